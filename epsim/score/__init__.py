"""From loads to metrics, optimum, gaps, statistics and the verdict."""
