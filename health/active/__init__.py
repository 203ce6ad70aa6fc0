"""Active checks: idle machines prove themselves by short jobs that make room for users' jobs."""
