"""`epsim plan`: plans a placement and writes it in the file format of a serving system."""

from __future__ import annotations

from typing import Annotated

import typer

import epsim
from epsim.cli.options import progress_bar
from epsim.files import check_target
from epsim.requests import PlanRequest


def plan_command(
    request: PlanRequest,
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="The file to write.")],
    format_name: Annotated[str, typer.Option("--format", help="File format: sglang, vllm, trtllm or epsim.")] = "epsim",
) -> None:
    """Plan a placement and write it for a serving system. All steps of the trace are used."""
    from epsim.placement.formats import check_format
    from epsim.policies.stack import placement_policy

    placement_policy(request.placement)
    check_format(format_name)
    check_target(out)
    with progress_bar() as progress:
        placement = epsim.plan(**vars(request) | {"progress": progress})
    placement.write(out, format_name)
    slots = f"{placement.num_physical} slots a layer"
    print(f"{out}: {request.placement} for {request.ranks} ranks, {slots}, {format_name} format")
