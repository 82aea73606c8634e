"""Tiny models, ranks, and the plain loops that they are compared with."""
