"""Adapters: pure functions from a model's shapes, the parallel sizes and a rank to the `Layout` of that rank, for every
trainer and engine whose memory Tandem knows. No torch and no weights: a plan can be made for a cluster of any size.
"""
