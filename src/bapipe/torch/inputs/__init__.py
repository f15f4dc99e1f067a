"""What the user's code provides: a model, its loss and its batches."""
