"""Whole runs of every algorithm, and what drives them."""
