"""Scorers: the forward pass of a model that ends in the scores of valid tokens, and of no others."""
