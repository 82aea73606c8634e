"""Simulation of whole steps: the real scheduler in virtual time, with the rates of kinds of GPUs"""
