"""The control socket and HTTP: connections, requests, answers."""
