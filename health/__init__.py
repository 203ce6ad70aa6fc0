"""Node health: checks write verdicts, the prolog's runner reads them, the broker drains by them."""
