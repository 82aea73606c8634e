"""``coordinator plan``: layouts, memory, transfers and ages, predicted from a configuration."""
