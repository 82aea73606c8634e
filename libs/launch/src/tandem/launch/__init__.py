"""Launching: start a run's processes on this host or a cluster, and keep them running"""
