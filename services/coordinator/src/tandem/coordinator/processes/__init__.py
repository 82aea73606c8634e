"""The processes of a run: which are in it, and the checks of their replies."""
