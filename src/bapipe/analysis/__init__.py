"""Plans beside runs: predicted against measured, recalibration, and what-if questions."""
