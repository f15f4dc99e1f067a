"""PipeDream's asynchronous 1F1B with weight versions, for comparison."""
