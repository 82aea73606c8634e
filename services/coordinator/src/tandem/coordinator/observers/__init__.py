"""Observers of a run: told of what happens, and without influence on it"""
