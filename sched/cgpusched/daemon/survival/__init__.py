"""What lets the daemon die at any moment: its state, the descriptors kept for the next one, and becoming it."""
