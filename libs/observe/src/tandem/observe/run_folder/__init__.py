"""The files of a run's folder: the journal, checkpoints, curves, and the live status"""
