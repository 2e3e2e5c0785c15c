"""Data sets, and the loader that gives each rank its part of every global batch."""
