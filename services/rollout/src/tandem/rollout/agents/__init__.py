"""Agents: user programs that play episodes against an endpoint of the rollout."""
