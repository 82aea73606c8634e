"""Training by single calls of a front end: a gradient, an optimizer step, a state to go back to."""
