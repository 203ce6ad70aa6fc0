"""Changes that `up` makes to a running cluster: its images, the plan, and what users lose."""
