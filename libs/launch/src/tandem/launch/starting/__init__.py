"""``coordinator init``: starting configurations, commented, made from a few choices."""
