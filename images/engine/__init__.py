"""The docker engine and its image stores; the only importer of docker."""
