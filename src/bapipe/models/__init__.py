"""Models as ordered layers: what the planner moves between accelerators."""
