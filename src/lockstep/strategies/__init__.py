"""Strategies: how a model and its training step are spread over ranks."""
