"""Environments of other packages, behind their own servers, which are installed apart."""
