"""Rollout groups: how far they are, which engine generates which, and what was generated before."""
