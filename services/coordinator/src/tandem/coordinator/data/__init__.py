"""Functions that write worked solutions, which configurations name by their path here"""
