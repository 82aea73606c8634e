"""vLLM as an engine: `insides` touches its insides, `weights` describes its memory, `engine` drives it."""
