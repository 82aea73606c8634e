"""Images of prompts: how they are read and kept, and which tokens they become.

Nothing here imports torch, and PIL is imported when the first image is read.
"""
