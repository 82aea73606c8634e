"""The trainer service: one process for each rank, with models, optimizers and checkpoints."""
