"""Launchers: each runs one function in every rank."""
