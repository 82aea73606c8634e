"""``coordinator eval``: models that runs without steps validate, and the table of their scores."""
