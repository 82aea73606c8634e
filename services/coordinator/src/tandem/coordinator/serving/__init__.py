"""Models for people to use: find one, have it served, and talk to it."""
