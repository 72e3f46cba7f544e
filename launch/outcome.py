"""The results of a run as they are written: how the job was run, and what was measured or predicted."""

import platform
import shlex
from pathlib import Path
from typing import Any

import torch

from epsim.launch.measured import Measured
from epsim.launch.prepare import Prepared, is_folder
from epsim.results import SCHEMA_VERSION, ResultsData, described_cluster, described_trace
from epsim.runtime.job import Job, Place
from epsim.version import VERSION


def description(prepared: Prepared, job: Job, place: Place, exchange: str, why: str) -> dict[str, Any]:
    """The entry `run` of results.json: how the job was run, and on what."""
    return {
        "version": VERSION,
        "shape": job.shape.name,
        "hidden": job.shape.hidden,
        "ranks": place.num_ranks,
        "nodes": job.num_nodes,
        "stacks": [str(s.stack) for s in job.stacks],
        "names": [s.name for s in job.stacks],
        "placements": [s.placement.version for s in job.stacks],
        "seed": job.seed,
        "steps": job.num_steps,
        "exchange": exchange,
        "exchange_why": why,
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU",
        "host": platform.node(),
        "dtype": str(place.dtype).removeprefix("torch."),
        "expert_bytes": 3 * job.shape.hidden * job.shape.intermediate * place.dtype.itemsize,
        "timed_by": "device events" if place.device.type == "cuda" else "the host's clock",
        "torch": torch.__version__,
        "weights": prepared.options.model if is_folder(prepared.options.model) else "random",
        "fingerprint": prepared.fingerprint,
    }


def results_of(prepared: Prepared, measured: Measured, described: dict[str, Any], predicted: bool) -> ResultsData:
    """The results of the run, or (predicted) of a replay of the same steps and placements."""
    meta, cluster, options = prepared.meta, prepared.cluster, prepared.options
    first, history = prepared.first, prepared.history
    words = "no placement needs a history"
    if history is not None:
        words = f"placements planned on {Path(options.history or '').name}"
    elif first:
        words = f"placements planned on the first {first} steps, which are not run"
    planned = first if history is None else history.num_steps
    results: ResultsData = {
        "schema": SCHEMA_VERSION,
        "kind": "replay" if predicted else "run",
        "trace": described_trace(Path(options.trace).name, meta, planned, prepared.last - first, prepared.notes),
        "setting": {
            **described_cluster(cluster),
            "seed": options.seed,
            "shared_cost": prepared.shape.shared_cost,
            "history": words,
            **({} if prepared.timing is None else {"timing": prepared.timing.words()}),
            "version": VERSION,
            "command": shlex.join(["epsim", "run", *options.arguments()]),
        },
        **(measured.predicted if predicted else measured.measured),
    }
    if not predicted:
        results["run"] = described | {"equals_replay": not measured.differing, "note": measured.note}
    return results
