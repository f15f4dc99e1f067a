"""One stage on one rank: forward, backward, and what is saved between them."""
