"""The rendered chart, read as pods."""
