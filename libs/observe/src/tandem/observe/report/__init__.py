"""Reports of runs: summaries, charts, and a single page with both"""
