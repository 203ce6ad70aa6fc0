"""WorkerPools: which pods should exist, which should be replaced or lent, and in which order."""
