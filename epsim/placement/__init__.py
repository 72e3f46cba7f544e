"""Where experts live."""
