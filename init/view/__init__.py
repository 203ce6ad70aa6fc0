"""Shows: ready or not and why, a status for people, metrics, the boot as a picture. Pure."""
