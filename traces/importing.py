"""Imports any readable recording as a stored trace."""

import atexit
import copy
import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from epsim.files import check_source
from epsim.models.known import find_model
from epsim.traces.options import ImportOptions, check_phase
from epsim.traces.readers import read_recording
from epsim.traces.readers.base import Recording
from epsim.traces.readers.document import naming
from epsim.traces.select import select_steps, take_layers
from epsim.traces.store import StoredTrace, TraceWriter, slice_steps
from epsim.traces.trace import Array, Block, TokenBlock, TraceMeta

SAMPLE = "sample"
Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def import_trace(sources: Sources, target: str | os.PathLike[str], options: ImportOptions | None = None) -> StoredTrace:
    """Imports the files of one recording (or of a folder) and writes them as a Parquet trace to target.

    Dense layers (no token in any step) and the unfilled end of a buffer are dropped, and notes say so. Raises
    FileNotFoundError or ValueError, which says in one line what is wrong and where; then nothing is written.
    """
    paths = _as_list(sources)
    recording = read_recording(paths, options or ImportOptions())
    with naming(os.fspath(paths[0]), "recording"):
        meta, kept, stop = _survey(recording)
        if Path(target).exists() and any(Path(path).exists() and Path(path).samefile(target) for path in paths):
            raise ValueError(f"{target} is also a source: write the trace to another file")
        with TraceWriter(target, meta) as writer:
            first = 0
            for block in recording.blocks():
                part = slice_steps(block, 0, max(min(len(block.steps), stop - first), 0))
                first += len(block.steps)
                writer.append(take_layers(part, kept))
    try:
        return StoredTrace(target)
    except ValueError as error:  # Its values repeat so often that the trace is too large in memory for its file.
        Path(target).unlink()
        raise ValueError(str(error).replace(str(target), os.fspath(paths[0]))) from None


def open_trace(sources: Sources | StoredTrace, options: ImportOptions | None = None) -> StoredTrace:
    """Opens an epsim trace, the bundled trace `sample`, or any readable recording. A recording is first imported into a
    temporary file, which is deleted at exit.

    For an epsim trace, the options model, phase and shared_cost replace its values; other options must agree with it.
    Raises the errors of `import_trace`."""
    if isinstance(sources, StoredTrace):
        return _as_stated(copy.copy(sources), options)
    paths = _as_list(sources)
    if len(paths) == 1:
        if str(paths[0]) == SAMPLE and not Path(SAMPLE).exists():
            return _as_stated(StoredTrace(sample_path()), options)
        if _is_parquet(Path(paths[0])):
            return _as_stated(StoredTrace(paths[0]), options)
    return import_trace(paths, temporary_path(), options)


def selected(trace: StoredTrace, only: str | None, min_tokens: int) -> StoredTrace:
    """The steps that --only and --min-tokens select, in a temporary file; the trace itself if neither is given."""
    if only is None and min_tokens <= 1:
        return trace
    return select_steps(trace, temporary_path(), None if only is None else check_phase("--only", only), min_tokens)


def _as_stated(trace: StoredTrace, options: ImportOptions | None) -> StoredTrace:
    """The trace with the options applied to its meta. Raises ValueError if they contradict the file."""
    if options is None:
        return trace
    meta = trace.meta
    held = (("--top-k", options.top_k, meta.top_k), ("--experts", options.num_experts, meta.num_experts))
    for name, stated, value in held:
        if stated not in (None, value):
            raise ValueError(f"{trace.path}: {name} {stated}, but the trace has {value}")
    for name, stated in (("--batch", options.batch), ("--step-tokens", options.step_tokens)):
        if stated is not None:
            raise ValueError(f"{trace.path}: {name} works on imports only: this trace already has steps")
    known = find_model(options.model or "")
    if known and (known.num_experts, known.top_k) != (meta.num_experts, meta.top_k):
        has = f"{known.num_experts} experts, top-{known.top_k}; the trace has {meta.num_experts}, top-{meta.top_k}"
        raise ValueError(f"{trace.path}: --model {options.model} has {has}")
    filled = meta.shared_cost if known is None else known.shared_cost
    trace.meta = dataclasses.replace(
        meta,
        model=options.model or meta.model,
        phase=options.phase or meta.phase,
        shared_cost=filled if options.shared_cost is None else options.shared_cost,
    )
    return trace


def temporary_path() -> Path:
    """A path for a temporary trace, which is deleted at exit."""
    folder = Path(tempfile.mkdtemp(prefix="epsim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "trace.parquet"


def sample_path() -> Path:
    """The path of the bundled sample trace. Raises FileNotFoundError if it is not installed."""
    path = Path(__file__).with_name("sample.parquet")
    if not path.exists():
        raise FileNotFoundError(f"{path}: this installation has no sample trace: give a trace of your own")
    return path


def _as_list(sources: Sources) -> list[str | os.PathLike[str]]:
    return [sources] if isinstance(sources, str | os.PathLike) else list(sources)


def _is_parquet(path: Path) -> bool:
    if path.is_dir():
        return False
    check_source(path)
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _survey(recording: Recording) -> tuple[TraceMeta, list[int] | None, int]:
    """A first pass over the recording: (meta without dense layers, layers to keep or None for all, steps to keep)."""
    meta = recording.meta
    stop = 1 << 62
    if not (recording.may_have_dense or recording.unfilled_end):
        return meta, None, stop
    used = np.zeros(meta.num_layers, dtype=bool)
    num_steps = last = 0
    for block in recording.blocks():
        by_step = _nonempty(block)
        used |= by_step.any(axis=0)
        filled = np.flatnonzero(by_step.any(axis=1))
        last = num_steps + int(filled[-1]) + 1 if filled.size else last
        num_steps += len(block.steps)
    if not used.any():
        raise ValueError("no tokens in any layer: the counts are all zero")
    notes = list(meta.notes)
    if recording.unfilled_end and last < num_steps:
        stop = last
        notes.append(f"{num_steps - last} unfilled zero steps dropped at the end, {last} kept")
    kept = None if used.all() else [int(i) for i in np.flatnonzero(used)]
    if kept is not None:
        dense = [meta.layers[i] for i in np.flatnonzero(~used)]
        notes.append(f"{len(dense)} dense layers without tokens dropped: {_ranges(dense)}")
        layers = tuple(meta.layers[i] for i in kept)
        meta = dataclasses.replace(meta, num_layers=len(kept), layers=layers)
    return dataclasses.replace(meta, notes=tuple(notes)), kept, stop


def _nonempty(block: Block) -> Array:
    """[S, L] bool: whether a layer has any assignment in a step."""
    if not isinstance(block, TokenBlock):
        return np.asarray(block.counts.any(axis=tuple(range(2, block.counts.ndim))))
    result = np.zeros((len(block.steps), block.expert_ids.shape[1]), dtype=bool)
    np.logical_or.at(result, block.token_step, np.greater_equal(block.expert_ids, 0).any(axis=2))
    return result


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 7 -> `0-2, 7`."""
    by_run = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_run]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
