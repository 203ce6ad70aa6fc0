"""What a fleet says of a commit, and how it is signed."""
