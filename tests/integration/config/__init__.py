"""Checks before a run, models and data of the Hub, and the documentation's commands."""
