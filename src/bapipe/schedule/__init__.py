"""Schedules: ordered actions per rank, their generators, files and validation."""
