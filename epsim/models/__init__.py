"""Models: routing, widths, layers and types of weights, one card each."""
