"""Preparation of a run: check what it needs, fetch models, and find what it begins from."""
