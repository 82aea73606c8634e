"""vLLM as an engine: `insides` and `float8` touch its insides, `weights` describes its memory, `engine` drives it."""
