"""The processes of a run: how they join, and the checks of their replies."""
