"""Judgements of numbers: bounds, spreads, and what is out of all proportion."""
