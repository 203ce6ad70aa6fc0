"""An operator's additions to a compiled plan: YAML services and supervisor's programs."""
