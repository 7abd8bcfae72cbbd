"""Parameter servers: the messages between servers and trainers, and the two kinds of updates."""
