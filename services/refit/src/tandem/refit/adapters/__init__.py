"""Adapters: pure functions from a model's shapes, parallel sizes and a rank to that rank's `Layout`.

There is one for every known backend of trainers and engines. They need neither torch nor weights, so a cluster of any
size can be planned.
"""
