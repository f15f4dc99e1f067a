"""Starting runs, and one rank of a run from start to end."""
