"""`bapipe serve`: a page on this machine that plans while knobs are turned (docs/decisions/0007-serve.md)."""
