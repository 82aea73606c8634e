"""The subcommands of ``coordinator``, a module each: `add` declares one and its function."""
