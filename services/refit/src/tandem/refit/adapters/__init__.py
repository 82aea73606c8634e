"""Adapters: pure functions from a model's shapes, parallel sizes and a rank to that rank's `Layout`.

There is one for every trainer and engine whose memory Tandem knows. No torch and no weights: a plan can be made for a
cluster of any size.
"""
