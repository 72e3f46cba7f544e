"""What the functions of `import epsim` can be asked for. Their parameters, and options of commands, are made from this.

Nothing heavy is imported here: `epsim COMMAND --help` reads these classes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from epsim.launch.options import LaunchOptions, Policies
from epsim.options import (
    AnyPath,
    ClusterOptions,
    PlanningOptions,
    Progress,
    SeedOptions,
    StepOptions,
    TimeOptions,
    about,
    quiet,
)
from epsim.traces.options import ImportOptions, ReadOptions, SharedCostOptions

if TYPE_CHECKING:
    from epsim.traces.store import StoredTrace

__all__ = ["LaunchOptions", "LoadRequest", "PlanRequest", "ReplayRequest", "TuneRequest"]

AnyTrace: TypeAlias = "AnyPath | StoredTrace"

TRACE = about("A trace (Parquet), any readable recording, or `sample`.", metavar="TRACE", argument=True, kind=str)


@dataclass(frozen=True, kw_only=True)
class LoadRequest(StepOptions, ImportOptions):
    trace: AnyTrace | Sequence[AnyPath] = field(
        kw_only=False,
        metadata=about("A trace (Parquet), a recording's file, files or folder, or `sample`.", argument=True, kind=str),
    )


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What only Python gives. command: the command that the results name, made from the other fields by default."""

    progress: Progress = quiet
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(ClusterOptions, PlanningOptions, StepOptions, TimeOptions, ReadOptions, SharedCostOptions, _Asked):
    trace: AnyTrace = field(kw_only=False, metadata=TRACE)
    policies: Policies = field(
        kw_only=False,
        metadata=about(
            'A policy stack, e.g. "eplb+lplb"; repeatable.',
            flag="--policy",
            metavar="[NAME=]STACK",
            kind=tuple[str, ...],
        ),
    )
    history: AnyTrace | None = field(
        default=None,
        metadata=about("Plan placements on this trace and score all of TRACE.", metavar="TRACE", kind=str),
    )
    device: str = field(
        default="cpu",
        metadata=about("Where splits are solved: cpu or cuda. The results are the same.", choices=("cpu", "cuda")),
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ClusterOptions, StepOptions, ReadOptions, _Asked):
    trace: AnyTrace = field(kw_only=False, metadata=TRACE)
    placement: str = field(
        default="eplb", kw_only=False, metadata=about("contiguous, eplb, searched, ...", metavar="NAME")
    )


@dataclass(frozen=True, kw_only=True)
class TuneRequest(StepOptions, SeedOptions, TimeOptions, ReadOptions, SharedCostOptions, _Asked):
    trace: AnyTrace = field(kw_only=False, metadata=TRACE)
    model: str = field(metadata=about("A shipped model, such as deepseek-v3, or a .toml file.", metavar="M"))
    hardware: str = field(
        metadata=about("h100, h200, h800, b200, a .toml file, or the folder that `epsim calibrate` wrote.", metavar="H")
    )
    gpus: int = field(metadata=about("GPUs (ranks) of the expert-parallel group.", least=1, most=1 << 14))
    nodes: int | None = field(
        default=None,
        metadata=about("Hosts that hold the GPUs. Default: as many as the hardware needs.", least=1),
    )
    memory_per_gpu: str | None = field(
        default=None,
        metadata=about("Memory of a GPU, such as 141GB. Default: what the hardware has.", metavar="SIZE"),
    )
    kv_share: float = field(
        default=0.2, metadata=about("Share of the memory that is kept free for the KV cache and activations.")
    )
    redundant: Sequence[int] = field(
        default=(),
        metadata=about(
            "Number of redundant experts in a layer to try; repeatable.", least=0, metavar="N", kind=tuple[int, ...]
        ),
    )
    policies: Policies = field(
        default=(),
        metadata=about(
            'Stacks to try instead of all, e.g. "eplb+lplb"; repeatable.',
            flag="--policy",
            metavar="STACK",
            kind=tuple[str, ...],
        ),
    )
    intervals: Sequence[int] = field(
        default=(),
        metadata=about(
            "Number of steps between rebalances to try; repeatable.",
            flag="--interval",
            metavar="STEPS",
            kind=tuple[int, ...],
        ),
    )
    routers: Sequence[str] = field(
        default=(),
        metadata=about(
            'Routers to try as well, e.g. "oea(k0=4)"; they change what the model says. Repeatable.',
            flag="--router",
            metavar="ROUTER",
            kind=tuple[str, ...],
        ),
    )
    quality_loss: str = field(
        default="",
        metadata=about("With a router or reader: the loss of quality that you accept, in words.", metavar="WORDS"),
    )
    worth: float = field(
        default=0.005,
        metadata=about("A gain in throughput below this share is not worth memory or more moving parts."),
    )
    rebalance_layer_ms: float | None = field(
        default=None,
        metadata=about("Work of the host for rebalancing one layer, besides moving the weights. Default: 10."),
    )
    groups: int | None = field(
        default=None, metadata=about("Expert groups of the model's router. Default: the model's.", least=1)
    )
    model_path: str | None = field(
        default=None, metadata=about("Where serving systems find the model, for the commands that are printed.")
    )
