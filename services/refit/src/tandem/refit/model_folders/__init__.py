"""Checks of models' folders before a run: what a policy, a teacher, a value or reward model has to hold."""
