"""Weights: the newest version, its verification, and the refit service."""
