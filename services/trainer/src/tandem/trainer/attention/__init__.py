"""Attention over rows of several sequences, in Hugging Face models."""
