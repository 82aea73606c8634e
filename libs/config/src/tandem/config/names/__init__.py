"""Names of settings elsewhere: in later releases of NeMo-RL, and in TRL and verl."""
