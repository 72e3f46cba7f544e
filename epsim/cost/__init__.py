"""The cost of a layer: time, bytes and memory."""
