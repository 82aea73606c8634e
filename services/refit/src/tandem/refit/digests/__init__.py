"""Digests: what they are, how a process computes its share beside other work, and how shares are compared."""
