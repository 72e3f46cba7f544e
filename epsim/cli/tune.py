"""`epsim tune`: recommends what to run on a cluster, within its memory."""

from __future__ import annotations

import epsim
from epsim.cli.options import JsonOption, OutOption, command_line, give, progress_bar
from epsim.files import folder_for_results
from epsim.requests import TuneRequest


def tune_command(request: TuneRequest, out: OutOption = None, json_output: JsonOption = False) -> None:
    """Recommend what to run on a cluster within its memory. Chooses redundant experts, placement and policies."""
    with folder_for_results(out):
        with progress_bar() as progress:
            results = epsim.tune(**vars(request) | {"command": command_line(), "progress": progress})
        from epsim.tuning.show import print_tune

        give(results, out, json_output, print_tune)
