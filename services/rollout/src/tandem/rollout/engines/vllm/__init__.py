"""vLLM as an engine: `insides`, `part`, `float8` touch its insides, `weights` describes its memory, `engine` drives."""
