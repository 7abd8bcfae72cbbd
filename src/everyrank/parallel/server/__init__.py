"""Parameter servers: what is said between servers and trainers, and the two kinds of update made of it."""
