"""The steps of the planner, in the order of `tandem.refit.planner`."""
