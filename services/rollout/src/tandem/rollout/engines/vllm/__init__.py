"""vLLM as a generation engine, written in place by refits.

`insides`, `part` and `float8` touch its internals, `weights` describes its memory, `engine` drives it.
"""
