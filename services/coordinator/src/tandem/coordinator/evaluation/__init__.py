"""``coordinator eval``: models that are validated by runs without steps, and the table of what they score."""
