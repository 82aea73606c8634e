"""Generation engines, one module each; all follow the protocol `tandem.rollout.engine.Engine`."""
