"""A small mixture-of-experts language model: its text, its training, and the sample trace recorded from it."""
