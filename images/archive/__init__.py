"""The distribution's package archive: resolve to a lock, fetch, bootstrap."""
