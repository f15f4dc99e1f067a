"""How layers are cut into stages."""
