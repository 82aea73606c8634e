"""Processes that are lost, join, leave or lie."""
