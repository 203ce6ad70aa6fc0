"""Views of the pod: readiness with reasons, a status for people, metrics, the boot as a picture. Pure."""
