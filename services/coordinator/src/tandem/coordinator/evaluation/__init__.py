"""``coordinator eval``: runs without steps that validate models, and the table of their scores."""
