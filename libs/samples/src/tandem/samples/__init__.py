"""Samples: data sets, tokens, arrays, the store that serves them, and the rollout log on disk."""
