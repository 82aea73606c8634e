"""Admission to a run: which processes may take part in it, by which names and keys."""
