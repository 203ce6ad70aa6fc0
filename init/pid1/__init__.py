"""Acts: PID 1 itself, which does what the engine decides. The standard library only."""
