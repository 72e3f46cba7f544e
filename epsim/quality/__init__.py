"""Measures what a policy costs the model: cross-entropy, distance to the plain model, repetition."""
