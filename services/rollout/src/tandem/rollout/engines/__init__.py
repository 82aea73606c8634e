"""Generation engines, one module each, for the protocol `tandem.rollout.engine.Engine`."""
