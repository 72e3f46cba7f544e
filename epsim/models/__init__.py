"""One card per model: routing, widths, layers and types of weights."""
