"""Generation engines, one module each, all obeying `tandem.rollout.engine.Engine`."""
