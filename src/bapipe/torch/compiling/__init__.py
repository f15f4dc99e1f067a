"""Captured layers as torch.compile makes them: forward, backward, and the backward in two parts."""
