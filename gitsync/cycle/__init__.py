"""One cycle from fetch to published, and the loop that runs one when it is time."""
