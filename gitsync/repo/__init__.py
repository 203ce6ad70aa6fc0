"""The local git repository: fetch, read, verify. Every call of git is in this folder."""
