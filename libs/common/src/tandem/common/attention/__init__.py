"""Attention of trainers and engines: its kernels for rows of sequences, and a model's settings of it."""
