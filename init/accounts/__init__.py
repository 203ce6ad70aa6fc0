"""Accounts as code: slurmdbd follows accounts.yaml."""
