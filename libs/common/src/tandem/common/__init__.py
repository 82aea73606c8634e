"""What every process shares: messages, the wire, configuration, errors."""
