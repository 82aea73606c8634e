"""The coordinator: scheduling, advantages, journal and command line, without torch."""
