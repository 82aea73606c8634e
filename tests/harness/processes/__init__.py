"""Programs that tests start: services that are slow, lie or do harm."""
