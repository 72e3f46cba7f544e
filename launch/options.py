"""The options of a run, as a dataclass and as command-line arguments. They are the same for every launcher."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from epsim.options import MOST_SLOTS, About, AnyPath, PlanningOptions, command_words

if TYPE_CHECKING:
    from epsim.policies.stack import PolicyStack

LAUNCHERS = ("inline", "torchrun", "ray")
EXCHANGES = ("auto", "deep_ep", "torch")
DEVICES = ("auto", "cpu", "cuda")
CONTEXT = 64
DTYPES = ("auto", "float32", "bfloat16")
ONLY_BFLOAT16 = "on GPUs experts compute in bfloat16; leave --dtype out, or give --device cpu"

Policies: TypeAlias = "str | PolicyStack | Sequence[str | PolicyStack]"
STACKS = About(
    'A policy stack, e.g. "eplb+lplb"; repeatable.', flag="--policy", metavar="[NAME=]STACK", kind=tuple[str, ...]
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(PlanningOptions):
    """Options of a run. Policies are kept as texts and paths as strings, so that a command line can hold them."""

    trace: Annotated[
        AnyPath,
        About("A trace of tokens (Parquet), a recording, or `sample`.", metavar="TRACE", argument=True, kind=str),
    ] = field(kw_only=False)
    model: Annotated[
        str,
        About("deepseek-v3-layer, qwen3-30b-a3b-layer, tiny (any trace), or a trained model's folder.", metavar="SPEC"),
    ]
    policies: Annotated[Policies, STACKS] = field(kw_only=False)
    out: Annotated[AnyPath, About("The folder for results.json and telemetry.", metavar="DIR", kind=str)]
    steps: Annotated[
        int | None, About("Number of steps to run, after the steps used for planning. Default: all.", least=1)
    ] = None
    ranks: Annotated[
        int | None, About("Number of processes. If there are GPUs, each has one.", least=1, most=MOST_SLOTS)
    ] = None
    nodes: Annotated[int, About("Nodes (hosts) for which placements are planned.", most=MOST_SLOTS)] = 1
    redundant: Annotated[int, About("Redundant experts per layer: slots beyond one per expert.", most=MOST_SLOTS)] = 0
    groups: Annotated[int, About("Expert groups of the model's router.", most=MOST_SLOTS)] = 1
    layers: Annotated[int | None, About("Run only this many layers, the first of the trace.", least=1)] = None
    history: Annotated[
        AnyPath | None,
        About("Plan placements on this other trace, and run all steps of TRACE.", metavar="HISTORY", kind=str),
    ] = None
    exchange: Annotated[str, About("Dispatch and combine by auto, deep_ep or torch.", choices=EXCHANGES)] = "auto"
    device: Annotated[str, About("auto, cpu or cuda.", choices=DEVICES)] = "auto"
    dtype: Annotated[str, About("auto (bfloat16 on GPUs, else float32), float32 or bfloat16.", choices=DTYPES)] = "auto"
    timeout: Annotated[
        float, About("Stop the run if a rank stays longer in a phase.", metavar="SECONDS", least=1, most=3600)
    ] = 20.0
    hardware: Annotated[
        str | None,
        About("Also predict layer times on h100, ..., a .toml file, or an `epsim calibrate` folder.", metavar="H"),
    ] = None
    text: Annotated[AnyPath | None, About("Trained model: the text to read.", metavar="FILE", kind=str)] = None
    sequence: Annotated[int | None, About("Trained model: longest prefill sequence, in tokens.", least=1)] = None
    context: Annotated[int, About("Trained model: tokens in the KV cache before a decode step.", least=1)] = CONTEXT
    launcher: Annotated[str, About("inline (one process), torchrun or ray.", choices=LAUNCHERS)] = LAUNCHERS[0]

    def __post_init__(self) -> None:
        single = isinstance(self.policies, str) or not isinstance(self.policies, Iterable)
        policies: Iterable[object] = (self.policies,) if single else self.policies  # type: ignore[assignment]
        object.__setattr__(self, "policies", tuple(map(str, policies)))
        for name in ("trace", "out", "history", "text"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        super().__post_init__()
        if (self.device, self.dtype) == ("cuda", "float32"):
            raise ValueError(f"--dtype float32: {ONLY_BFLOAT16}")
        if not self.policies:
            raise ValueError("no policy to run: give --policy STACK at least once")

    @property
    def folder(self) -> Path:
        """`out` as a path."""
        return Path(self.out)

    def arguments(self) -> list[str]:
        """The command line of the worker; the trace first, defaults left out."""
        return command_words(self)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RunOptions):
    """The options of a run and of its launcher."""

    gpus: Annotated[int | None, About("With --launcher ray: number of ranks, each on a GPU.", least=1)] = None
    cpus: Annotated[int | None, About("With --launcher ray: number of ranks, each on a CPU.", least=1)] = None
    restarts: Annotated[int, About("With --launcher ray: maximum number of restarts after failures.", least=0)] = 2
