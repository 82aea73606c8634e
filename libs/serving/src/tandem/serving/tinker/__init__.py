"""The Tinker protocol: clients' calls go to a desk, which a run takes them from, or to engines."""
