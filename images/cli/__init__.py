"""Commands of build.py, and the session that they share."""
