"""Bisection: short trials of a run, each with one thing changed, to name what its trouble came from."""
