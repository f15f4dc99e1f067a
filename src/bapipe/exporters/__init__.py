"""Plans as other engines read them, and other engines' splits as BaPipe reads them. No torch."""
