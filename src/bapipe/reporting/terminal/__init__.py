"""Plans, timelines and comparisons as text for a terminal."""
