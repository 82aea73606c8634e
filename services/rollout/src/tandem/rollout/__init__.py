"""The rollout service: prompts to scored samples; engines, environments and rewards."""
