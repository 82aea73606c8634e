"""Preparation of a run: check all of it, and find what it begins from, or what it replays."""
