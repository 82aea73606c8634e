"""Samples: their tokens, their arrays, the store that gives them out, and the record on disk"""
