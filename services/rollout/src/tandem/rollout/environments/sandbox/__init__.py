"""Untrusted programs, shut in: the starter's side, and the program that shuts itself in."""
