"""Transports: ways to move bytes between processes; one module each, all listed in `registry`."""
