"""What several test files share: commands, worlds of ranks, composed configs, event files."""
