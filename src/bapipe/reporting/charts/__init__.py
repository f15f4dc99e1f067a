"""The report's pictures as SVG: pure functions from a plan's figures to a Chart."""
