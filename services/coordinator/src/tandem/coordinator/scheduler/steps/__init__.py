"""Steps: the step in progress, the checkpoint, and the rollout log."""
