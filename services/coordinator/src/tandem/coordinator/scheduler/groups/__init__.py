"""The room of rollout groups: how far they are, which engine makes which, and what was made before."""
