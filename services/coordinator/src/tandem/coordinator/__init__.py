"""The coordinator: scheduling, data order, advantages, journal and command line, without torch."""
