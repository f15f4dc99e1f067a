"""Hardware as described: accelerators, links, clusters, and the catalogue of known accelerators."""
