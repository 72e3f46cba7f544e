"""Reproduces published tables from recorded routing, the policies and the layer-time model."""
