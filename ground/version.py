"""The project's version: the only place that states it. pyproject.toml reads it; a test compares the chart's."""

VERSION = "0.1.0"
