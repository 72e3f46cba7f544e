"""The parameters of the functions of `import epsim`, which are also the options of the commands.

Nothing heavy is imported here, because `epsim COMMAND --help` reads these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from epsim.launch.options import STACKS, LaunchOptions, Policies
from epsim.options import (
    About,
    AnyPath,
    ClusterOptions,
    PlanningOptions,
    Progress,
    SeedOptions,
    StepOptions,
    TimeOptions,
    quiet,
)
from epsim.traces.options import ImportOptions, ReadOptions, SharedCostOptions

__all__ = ["LaunchOptions", "LoadRequest", "PlanRequest", "ReplayRequest", "TuneRequest"]

TEXTS = tuple[str, ...]
TRACE = About("A trace (Parquet), any readable recording, or `sample`.", metavar="TRACE", argument=True, kind=str)


@dataclass(frozen=True, kw_only=True)
class LoadRequest(StepOptions, ImportOptions):
    trace: Annotated[
        AnyPath | Sequence[AnyPath],
        About("A trace (Parquet), a recording's file, files or folder, or `sample`.", argument=True, kind=str),
    ] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class _Python:
    """Parameters that only Python has. command: is written into the results; by default made from the other fields."""

    progress: Progress = quiet
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(ClusterOptions, PlanningOptions, StepOptions, TimeOptions, ReadOptions, SharedCostOptions, _Python):
    trace: Annotated[AnyPath, TRACE] = field(kw_only=False)
    policies: Annotated[Policies, STACKS] = field(kw_only=False)
    history: Annotated[
        AnyPath | None,
        About("Plan placements on this other trace, and score all steps of TRACE.", metavar="HISTORY", kind=str),
    ] = None
    device: Annotated[
        str, About("Device that solves splits: cpu or cuda. The results are the same.", choices=("cpu", "cuda"))
    ] = "cpu"


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ClusterOptions, StepOptions, ReadOptions, _Python):
    trace: Annotated[AnyPath, TRACE] = field(kw_only=False)
    placement: Annotated[str, About('A placement policy, e.g. "searched(seconds=60)".', metavar="POLICY")] = field(
        default="eplb", kw_only=False
    )


@dataclass(frozen=True, kw_only=True)
class TuneRequest(StepOptions, SeedOptions, TimeOptions, ReadOptions, SharedCostOptions, _Python):
    trace: Annotated[AnyPath, TRACE] = field(kw_only=False)
    model: Annotated[str, About("A shipped model, such as deepseek-v3, or a .toml file.", metavar="M")] = field()
    hardware: Annotated[
        str, About("h100, h200, h800, b200, a .toml file, or the folder that `epsim calibrate` wrote.", metavar="H")
    ] = field()
    gpus: Annotated[int, About("GPUs (ranks) of the expert-parallel group.", least=1, most=1 << 14)]
    nodes: Annotated[
        int | None, About("Nodes (hosts) that hold the GPUs. Default: as many as this hardware needs.", least=1)
    ] = None
    memory_per_gpu: Annotated[
        str | None, About("Memory of each GPU, such as 141GB. Default: the hardware's.", metavar="SIZE")
    ] = None
    kv_share: Annotated[float, About("Share of the memory to keep free for the KV cache and activations.")] = 0.2
    redundant: Annotated[
        Sequence[int],
        About("Number of redundant experts per layer to try; repeatable.", least=0, metavar="N", kind=tuple[int, ...]),
    ] = ()
    policies: Annotated[
        Policies, About('Try only these stacks, e.g. "eplb+lplb"; repeatable.', "--policy", metavar="STACK", kind=TEXTS)
    ] = ()
    intervals: Annotated[
        Sequence[int],
        About(
            "Rebalancing intervals to try, in steps; repeatable.", "--interval", metavar="STEPS", kind=tuple[int, ...]
        ),
    ] = ()
    routers: Annotated[
        Sequence[str],
        About('Also try these routers, which change outputs, e.g. "oea(k0=4)"; repeatable.', "--router", kind=TEXTS),
    ] = ()
    quality_loss: Annotated[
        str, About("With a router or reader: the quality loss that you accept, in words.", metavar="TEXT")
    ] = ""
    baseline: Annotated[
        str | None, About('The stack in use today, e.g. "file(path=map.json)". Default: contiguous.', metavar="STACK")
    ] = None
    worth: Annotated[
        float, About("Smallest throughput gain, as a share, that justifies more memory or other policies.")
    ] = 0.005
    rebalance_layer_ms: Annotated[
        float | None, About("Milliseconds on the host to rebalance one layer, without moving weights. Default: 10.")
    ] = None
    groups: Annotated[int | None, About("Expert groups of the model's router. Default: the model's.", least=1)] = None
    model_path: Annotated[str | None, About("The model's path on the serving system, for printed commands.")] = None
