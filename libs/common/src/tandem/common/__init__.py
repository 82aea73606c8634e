"""Shared by every process: messages, the wire, keys, errors."""
