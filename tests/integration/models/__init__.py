"""Kinds of models and of losses, against plain loops."""
