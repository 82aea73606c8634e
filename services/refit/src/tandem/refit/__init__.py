"""The weight plane: layouts, transfer plans, copy programs, transports, versions and digests."""
