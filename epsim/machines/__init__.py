"""Machines, one card each: a GPU and its links."""
