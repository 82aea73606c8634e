"""The subcommands of ``coordinator``, a module for each or few: `add` declares one and its function."""
