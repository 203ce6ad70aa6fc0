"""Tell people of their jobs by mail and webhook."""
