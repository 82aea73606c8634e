"""Engines: how they are built, join, come back and leave, and how they are connected."""
