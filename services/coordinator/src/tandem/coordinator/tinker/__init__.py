"""The Tinker front end: its command, and the loop of a run whose steps clients call for."""
