"""The optimal contiguous partition, by dynamic programming and branch and bound."""
