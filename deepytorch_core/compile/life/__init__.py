"""The life of one model's compilation: a file for each of its phases, and what they share."""
