"""Forecasts of a run from its configuration alone, without weights, GPUs or processes"""
