"""One verdict: checks write it, the prolog's runner reads it, the broker drains by it."""
