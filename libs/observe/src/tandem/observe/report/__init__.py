"""Reports of runs: summaries, charts, and one page that holds them"""
