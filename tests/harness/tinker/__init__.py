"""A server of the Tinker API, and what clients do with it by the real SDK."""
