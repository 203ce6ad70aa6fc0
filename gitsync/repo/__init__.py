"""The local repository: fetched, read, verified. All of git is here."""
