"""`epsim replay`: replays a trace through policy stacks."""

from __future__ import annotations

import epsim
from epsim.cli.options import JsonOption, OutOption, command_line, give, progress_bar
from epsim.files import folder_for_results
from epsim.requests import ReplayRequest


def replay_command(request: ReplayRequest, out: OutOption = None, json_output: JsonOption = False) -> None:
    """Find the policy stack with the lowest peak load on a trace. Shows how far each stack is from the optimum."""
    with folder_for_results(out):
        with progress_bar() as progress:
            results = epsim.replay(**vars(request) | {"command": command_line(), "progress": progress})
        from epsim.report.table import print_table

        give(results, out, json_output, print_table)
