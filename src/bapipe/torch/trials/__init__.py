"""Plans tried for a few steps each, to correct their costs, to choose between them, and to choose without help."""
