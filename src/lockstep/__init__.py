"""Hydra-configured, distributed PyTorch training in which every rank agrees."""
