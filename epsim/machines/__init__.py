"""Machines: a GPU and its fabric, one card each."""
