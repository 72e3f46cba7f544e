"""`epsim run`: a trace's tokens through real expert-parallel layers."""

from __future__ import annotations

import epsim
from epsim.requests import LaunchOptions


def run_command(options: LaunchOptions) -> None:
    """Measure policy stacks on real expert-parallel layers.

    Sends the tokens of a trace through the layers, on GPUs or CPUs, and measures loads and times.
    """
    results = epsim.run(**vars(options))
    from epsim.report.table import print_table

    print_table(results.data)
    print(results.data["run"]["note"])
