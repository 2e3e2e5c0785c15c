"""Data sets, and how they are read."""

from lockstep.data.source import DataSource, Pair, Splits, Tensors

__all__ = ["DataSource", "Pair", "Splits", "Tensors"]
