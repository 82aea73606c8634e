"""Models named in a configuration: repositories, families, sizes and adapters."""
