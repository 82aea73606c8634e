"""The steps of the planner, in the order in which `tandem.refit.planner` names them."""
