"""What BaPipe writes down: plans and runs."""
