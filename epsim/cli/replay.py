"""`epsim replay`: a trace through policy stacks."""

from __future__ import annotations

import epsim
from epsim.cli.options import JsonOption, OutOption, command_line, give, progress_bar
from epsim.files import check_out
from epsim.requests import ReplayRequest


def replay_command(request: ReplayRequest, out: OutOption = None, json_output: JsonOption = False) -> None:
    """Replay a recorded trace through policy stacks: which is best, and how far each is from the best possible."""
    check_out(out)
    with progress_bar() as progress:
        results = epsim.replay(**vars(request) | {"command": command_line(), "progress": progress})
    from epsim.report.table import print_table

    give(results, out, json_output, print_table)
