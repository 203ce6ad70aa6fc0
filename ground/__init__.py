"""Ground: the few things that every package needs and none may import of another. The standard library only."""
