"""A role's work before its pod stops."""
