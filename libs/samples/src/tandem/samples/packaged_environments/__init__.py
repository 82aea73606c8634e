"""Environments of other packages: their tasks are a run's problems, and programs play their episodes."""
