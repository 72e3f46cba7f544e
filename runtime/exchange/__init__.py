"""Tokens to the ranks that serve them and back: torch collectives, or DeepEP."""
