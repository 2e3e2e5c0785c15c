"""What a command does: train, or use what was trained."""
