"""A small mixture-of-experts language model of our own: its text, its training, and the recording made from it."""
