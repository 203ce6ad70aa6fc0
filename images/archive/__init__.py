"""The distribution's archive: resolved to a lock, fetched, bootstrapped."""
