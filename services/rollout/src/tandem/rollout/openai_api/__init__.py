"""OpenAI's HTTP interface for any generator: messages, application, server."""
