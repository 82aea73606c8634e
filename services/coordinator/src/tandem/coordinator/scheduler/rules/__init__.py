"""The rules: what is decided, room by room."""
