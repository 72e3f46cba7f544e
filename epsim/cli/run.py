"""`epsim run`: runs the tokens of a trace through real expert-parallel layers."""

from __future__ import annotations

import epsim
from epsim.requests import LaunchOptions


def run_command(options: LaunchOptions) -> None:
    """Measure policy stacks on real expert-parallel layers. A trace gives the tokens and their experts."""
    results = epsim.run(**vars(options))
    from epsim.launch.measured import print_note
    from epsim.report.table import print_table

    print_table(results.data)
    print_note(results.data["run"])
