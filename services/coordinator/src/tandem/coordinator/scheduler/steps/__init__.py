"""The room of steps: the step in progress, the checkpoint and the record of samples."""
