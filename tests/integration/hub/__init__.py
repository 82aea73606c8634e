"""Models and data of the Hub: commits, caches, fetches that fail or are interrupted, and every place that names one."""
