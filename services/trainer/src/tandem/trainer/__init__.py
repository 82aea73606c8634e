"""The trainer service: one process a rank, with models, optimizer and checkpoints."""
