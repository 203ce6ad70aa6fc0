"""The docker engine and how it keeps images; the only importer of docker."""
