"""Weights through a store (``refit.store``): what trainers publish, and what engines mirror."""
