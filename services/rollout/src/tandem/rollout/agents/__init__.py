"""Agents: programs of the user's that play episodes against an endpoint of the rollout."""
