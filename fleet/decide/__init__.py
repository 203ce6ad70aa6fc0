"""Pure decisions: a snapshot, the memory, the time and the policy in; changes, notices and a new memory out."""
