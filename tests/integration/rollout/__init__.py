"""Engines, environments, agents and servers."""
