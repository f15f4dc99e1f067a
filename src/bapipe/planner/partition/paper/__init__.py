"""The paper's balanced partition, step by step."""
