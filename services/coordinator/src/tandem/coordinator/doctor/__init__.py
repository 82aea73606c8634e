"""Look over the machine: what a node has, what works, and how fast bytes move there."""
