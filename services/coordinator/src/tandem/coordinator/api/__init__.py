"""Tandem from Python: ``tandem.train``, ``tandem.load_run``, and what they return."""
