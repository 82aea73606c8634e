"""Observers of a run: they see its events, and have no influence on it."""
