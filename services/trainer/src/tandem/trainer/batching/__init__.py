"""Making micro-batches: a rank's sequences, divided by sequences or tokens and laid out for models."""
