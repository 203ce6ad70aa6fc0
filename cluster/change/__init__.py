"""What `up` changes of a running cluster: its images, the plan, and what is lost by it."""
