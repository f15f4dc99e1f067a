"""What layers and stages cost: profiles, rooflines, segments and the memory of a stage."""
