"""The check of a machine: what it has, what works, and how fast bytes move there."""
