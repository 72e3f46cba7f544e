"""Placements: which expert is in which slot."""
