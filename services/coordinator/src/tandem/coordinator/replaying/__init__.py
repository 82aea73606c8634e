"""Replay: a run's training once more, from its recorded samples or from the calls of its clients."""
