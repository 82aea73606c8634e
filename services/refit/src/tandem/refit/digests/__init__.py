"""Digests of weights: their definition, their computation beside other work, their comparison."""
