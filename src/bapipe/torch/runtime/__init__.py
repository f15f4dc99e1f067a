"""Training by a plan on every rank: the pipeline, its executor, and gradient sync."""
