"""From the definition and its lock to images."""
