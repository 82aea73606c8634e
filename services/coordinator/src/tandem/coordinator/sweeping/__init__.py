"""A sweep: runs of one configuration, one for each combination of values of some keys."""
