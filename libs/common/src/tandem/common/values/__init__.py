"""Values of a row: how they keep their type, and how they become text."""
