"""What the report shows of a plan, as values: costs per layer, and memory per rank."""
