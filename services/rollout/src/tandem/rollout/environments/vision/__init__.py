"""Score responses about images by NeMo-RL's functions."""
