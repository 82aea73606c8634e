"""Runs below a folder, side by side: their results, notes, tags, and differences of configuration."""
