"""Metrics and spans on their way to other programs, and what GPUs say"""
