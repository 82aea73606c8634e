"""The room of weights: the newest version, its verification, and the refit service."""
