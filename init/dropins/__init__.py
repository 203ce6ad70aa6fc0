"""What an operator adds to a compiled plan: YAML services, supervisor's programs."""
