"""Models, adapters and training loops of other libraries."""
