"""Preparation of a run: find its models, its data and its custom code, before any process needs them."""
