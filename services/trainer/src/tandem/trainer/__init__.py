"""The trainer service: one process a rank; policy, reference, optimizer and checkpoints."""
