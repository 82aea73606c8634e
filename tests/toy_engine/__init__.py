"""A third engine, which `tests/integration/rollout/test_third_engine.py` adds to a copy of the sources."""
