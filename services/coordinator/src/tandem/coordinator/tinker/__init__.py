"""The Tinker front end: a run that clients drive by single calls, over the protocol of the tinker SDK."""
