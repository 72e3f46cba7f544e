"""One card per machine: a GPU and its links."""
