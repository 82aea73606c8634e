"""Digests of weights: definition, computation beside other work, comparison."""
