"""What a role does before its pod stops."""
