"""The folder of a run: its files, and the files of an earlier run that a new run removes."""

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
    """The file of the experts that a model's own router chose under the stack of this number."""
    return f"routed-{number}.parquet"


def clear(options: RunOptions) -> None:
    """Removes the files that an earlier run wrote into the run's folder, and nothing else.

    Raises ValueError if the trace or another input is one of these files."""
    out = options.folder
    paths = [out / RESULTS, out / PREDICTED, *out.glob("routed-*.parquet")]
    paths += [path for path in (out / TELEMETRY).glob("rank-*") if WRITTEN.fullmatch(path.name)]
    old = {path.resolve() for path in paths if path.exists()}
    for name in (options.trace, options.history, options.text):
        if name is not None and any(Path(name).resolve() in (path, path.parent) for path in old):
            raise ValueError(
                f"--out {out}: {name} is part of the earlier run in it, which would be removed: give another folder"
            )
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # ranks on several machines may share the folder
            path.unlink()


def clear_logs(out: Path) -> None:
    """Removes the logs of an earlier run's workers. Call it before the workers of this run start."""
    for path in (out / LOGS).glob("epsim-*"):
        shutil.rmtree(path, ignore_errors=True)


def phases_of_steps(prepared: Prepared) -> dict[int, Phase] | None:
    """The phase of each step that is run; None if the whole trace has one phase."""
    phases: dict[int, Phase] = {}
    for block in prepared.blocks():
        if block.phase is None:
            return None
        phases |= dict(zip(block.steps.tolist(), block.phase.tolist(), strict=True))
    return phases


def write_routed(prepared: Prepared, blocks: Sequence[TokenBlock], text: str) -> None:
    """Writes the experts that the model's router chose. blocks: one per stack. text: the input of the model."""
    for number, ((_, stack), block) in enumerate(zip(prepared.policies, blocks, strict=True)):
        source = f"routed by {prepared.options.model}, fed with {text}, in `epsim run` under {stack}"
        scores = prepared.meta.num_experts if block.scores is not None else 0
        meta = dataclasses.replace(prepared.meta, source=source, notes=(), num_scores=scores)
        with TraceWriter(prepared.options.folder / routed_file(number), meta) as writer:
            writer.append(block)
