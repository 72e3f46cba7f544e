"""`epsim sweep`: a grid of replays on processes or on a Ray cluster, resumable, each cell computed once."""
