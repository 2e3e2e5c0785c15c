"""Snapshots: saved whole or not at all, verified when loaded, readable at any world size."""
