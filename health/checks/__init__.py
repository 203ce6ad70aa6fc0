"""Checks: loaded, given what they read, judged, their verdicts written."""
