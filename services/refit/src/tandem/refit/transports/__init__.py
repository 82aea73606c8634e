"""Transports: how bytes move between processes; one module each, all named in `registry`."""
