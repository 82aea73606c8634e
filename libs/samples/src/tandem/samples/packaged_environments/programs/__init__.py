"""Programs that play packaged environments, on any interpreter: they import nothing of Tandem's."""
