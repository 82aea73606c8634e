"""Every type of causal language model in Transformers: made tiny, measured, and shown as a table."""
