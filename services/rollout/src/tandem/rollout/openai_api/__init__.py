"""OpenAI's HTTP interface over whatever generates: messages, application, server."""
