"""Launching: find what a run needs, start its processes here or on a cluster, and keep them running"""
