"""PID 1 itself: performs the engine's decisions. Standard library only."""
