"""What a service is, and a role's services together: read, checked, compiled into one plan. Pure."""
