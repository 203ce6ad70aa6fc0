"""The mirror: nodes fetch from the controller, and only the controller fetches from the git server."""
