"""Training backends, one module each, all obeying `tandem.trainer.backend.Backend`."""
