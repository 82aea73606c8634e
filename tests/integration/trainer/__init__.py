"""The trainer's backends, against plain loops."""
