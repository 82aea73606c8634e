"""Checks of models' folders before a run: what a policy, teacher, value or reward model has to hold."""
