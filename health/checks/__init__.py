"""Load checks, read their sources, judge the readings and write the verdicts."""
