"""People of a file: `people.yaml` read strictly, and made known to a pod without a directory service."""
