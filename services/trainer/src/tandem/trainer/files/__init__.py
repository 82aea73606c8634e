"""Checkpoints and models on disk: boxes of tensors, the policy in Hugging Face's format, adapters"""
