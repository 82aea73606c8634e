"""The subcommands of ``coordinator``, a module each: `add` declares one and names what carries it out."""
