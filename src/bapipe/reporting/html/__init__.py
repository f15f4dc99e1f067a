"""A plan, and a run of it, as one HTML page."""
