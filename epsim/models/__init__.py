"""Models, one card each: routing, widths, layers and types of weights."""
