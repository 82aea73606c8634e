"""Environments in processes of their own: a pool of workers, their fork server, and their messages."""
