"""Runs compared with training in a single process."""
