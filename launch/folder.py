"""A run's folder: what lies in it, and what of an earlier run goes before a new one writes there."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from epsim.launch.options import RunOptions
from epsim.launch.prepare import Prepared
from epsim.traces.store import TraceWriter
from epsim.traces.trace import Phase, TokenBlock

RESULTS, PREDICTED, TELEMETRY, LOGS = "results.json", "predicted.json", "telemetry", "logs"
WRITTEN = re.compile(r"rank-\d{5,}\.(parquet|arrows|begun|place)")


def routed_file(number: int) -> str:
    """What a model's own router chose under the stack of that number."""
    return f"routed-{number}.parquet"


def clear(options: RunOptions) -> None:
    """Removes what an earlier run wrote into the run's folder, whose ranks and stacks may be others, and nothing else.
    Raises ValueError where the trace or another input is among it."""
    out = options.folder
    found = [out / RESULTS, out / PREDICTED, *out.glob("routed-*.parquet")]
    found += [path for path in (out / TELEMETRY).glob("rank-*") if WRITTEN.fullmatch(path.name)]
    going = {path.resolve() for path in found if path.exists()}
    for name in (options.trace, options.history, options.text):
        if name is not None and any(Path(name).resolve() in (path, path.parent) for path in going):
            raise ValueError(f"--out {out}: {name} is of the run there, which goes first: give another folder")
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # ranks of several machines may share the folder
            path.unlink()


def clear_logs(out: Path) -> None:
    """Those of an earlier run's workers; before this run's workers are started, which write there from the first."""
    for path in (out / LOGS).glob("epsim-*"):
        shutil.rmtree(path, ignore_errors=True)


def phases_of_steps(prepared: Prepared) -> dict[int, Phase] | None:
    """Of each step that is run; None where the trace is of one phase."""
    found: dict[int, Phase] = {}
    for block in prepared.blocks():
        if block.phase is None:
            return None
        found |= dict(zip(block.steps.tolist(), block.phase.tolist(), strict=True))
    return found


def write_routed(prepared: Prepared, blocks: Sequence[TokenBlock], text: str) -> None:
    """blocks: of each stack, what the model's router chose; text: what it was fed with."""
    for number, ((_, stack), block) in enumerate(zip(prepared.policies, blocks, strict=True)):
        source = f"routed by {prepared.options.model}, fed with {text}, in `epsim run` under {stack}"
        scores = prepared.meta.num_experts if block.scores is not None else 0
        meta = dataclasses.replace(prepared.meta, source=source, notes=(), num_scores=scores)
        with TraceWriter(prepared.options.folder / routed_file(number), meta) as writer:
            writer.append(block)
