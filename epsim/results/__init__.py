"""results.json, schema 1: what a replay or a run found, written whole or not at all, and checked against its schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from epsim.files import check_source, whole_file

if TYPE_CHECKING:
    from epsim.placement.base import Cluster
    from epsim.traces.trace import TraceMeta

Results: TypeAlias = dict[str, Any]

SCHEMA_VERSION = 1
_NUMBERS = re.compile(r"\[\n[\s\d.,eE+nul-]*\]")


def described_trace(name: str, meta: TraceMeta, planned: int, scored: int, notes: Sequence[str]) -> Results:
    """The entry `trace`. planned, scored: numbers of steps. notes: further ones than the trace's own."""
    return {
        "name": name,
        "source": meta.source,
        "level": meta.level,
        "origin": meta.origin,
        "model": meta.model,
        "phase": meta.phase,
        "num_layers": meta.num_layers,
        "layers": list(meta.layers),
        "num_experts": meta.num_experts,
        "top_k": meta.top_k,
        "steps_planned": planned,
        "steps_scored": scored,
        "notes": [*meta.notes, *notes],
    }


def described_cluster(cluster: Cluster) -> Results:
    """What the entry `setting` says of the ranks."""
    return {
        "ranks": cluster.num_ranks,
        "nodes": cluster.num_nodes,
        "redundant": cluster.num_redundant,
        "groups": cluster.num_groups,
    }


def kind_of(results: Mapping[str, Any]) -> str:
    """replay, run, tune, comparison or sweep."""
    return next((kind for kind in ("sweep", "comparison", "tune", "run") if kind in results), "replay")


def results_schema() -> dict[str, Any]:
    """The JSON schema of results.json (epsim/results/results.schema.json)."""
    schema: dict[str, Any] = json.loads(resources.files("epsim.results").joinpath("results.schema.json").read_text())
    return schema


def check_results(results: Mapping[str, Any], where: str = "results") -> None:
    """Raises ValueError that names the first place where results break the schema."""
    import jsonschema

    error = jsonschema.Draft202012Validator(results_schema()).iter_errors(results)
    first = next(iter(error), None)
    if first is not None:
        raise ValueError(f"{where}: {first.json_path}: {first.message.splitlines()[0][:200]}")


def read_results(path: Path) -> Results:
    """Raises FileNotFoundError or ValueError in one line."""
    check_source(path)
    try:
        results = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_finite, parse_float=_finite, parse_int=_whole
        )
        json.dumps(results, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a results.json ({str(error)[:200]}): make it again") from None
    check_results(results, str(path))
    assert isinstance(results, dict)
    return results


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 18:  # 64 bits hold no more
        raise ValueError(f"{text[:40]} has more than 18 digits")
    return int(text)


def write_results(results: Results, path: Path) -> None:
    check_results(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(as_text(results), encoding="utf-8")


def as_text(results: Results) -> str:
    """As it is written: readable, lists of numbers on one line. Raises ValueError for a number that JSON lacks."""
    text = json.dumps(results, indent=1, allow_nan=False)
    # A string holds no line break, so what is joined is never text.
    return _NUMBERS.sub(lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text) + "\n"
