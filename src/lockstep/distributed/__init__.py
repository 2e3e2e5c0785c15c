"""Ranks: their environment, the rendezvous store, process groups and collectives."""
