"""Ranks that watch each other, and how a run that fails says so."""
