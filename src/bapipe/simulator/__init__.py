"""From a schedule and costs to a timeline, without running anything."""
