"""Every type of causal language model in Transformers, as docs/models.md has it."""
