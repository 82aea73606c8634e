"""Custom code as it was when a run began."""
