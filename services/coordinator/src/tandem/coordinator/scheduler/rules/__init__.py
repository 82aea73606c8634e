"""The rules of the scheduler, by subject."""
