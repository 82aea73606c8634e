"""The weight plane: layouts, transfer plans, transfer programs, transports, versions and digests."""
