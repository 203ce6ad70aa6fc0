"""Canary rings: nodes' signed reports about a commit, and the board that collects them."""
