"""PipeDream's asynchronous 1F1B with weight stashing, for comparison."""
