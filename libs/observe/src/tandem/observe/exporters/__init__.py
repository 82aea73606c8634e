"""Metrics and spans exported to other programs, and measurements of GPUs"""
