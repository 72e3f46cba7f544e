"""Published tables, reproduced from mechanism: recorded routing, the policies themselves and the layer-time model."""
