"""Imported first by the server that ranks are forked from: it ends with its launcher, and they with it."""

from lockstep import signals

signals.end_with_parent()
