"""Errors of accounts as code."""

from __future__ import annotations

from init.errors import InitError


class AccountsError(InitError):
    """slurmdbd could not be read or changed, or a change needs a person's word."""
