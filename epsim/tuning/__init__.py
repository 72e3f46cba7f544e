"""What to run: a search over redundancy, placement, stack and rebalancing under a memory limit, answered in words."""
