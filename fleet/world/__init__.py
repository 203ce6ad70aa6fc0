"""What is there, on both sides, at one moment: parsed once, frozen, and unknown where it is not known."""
