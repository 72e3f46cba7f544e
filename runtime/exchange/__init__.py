"""Dispatch and combine: sends tokens to the ranks that serve them and returns the results."""
