"""results.json: the results of a command as plain dictionaries, checked when they are written and when they are read.

`kind` says which command wrote it. Each kind has a schema in epsim/results/schemas; docs/results.md describes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from epsim.files import check_source, whole_file
from epsim.results.checks import check_results as check_results

if TYPE_CHECKING:
    from epsim.placement.base import Cluster
    from epsim.traces.trace import TraceMeta

ResultsData: TypeAlias = dict[str, Any]

SCHEMA_VERSION = 1
_NUMBERS = re.compile(r"\[\n[\s\d.,eE+nul-]*\]")


def described_trace(name: str, meta: TraceMeta, planned: int, scored: int, notes: Sequence[str]) -> ResultsData:
    """The entry `trace`. planned, scored: numbers of steps. notes: are added to the trace's notes."""
    return {
        "name": name,
        **{key: getattr(meta, key) for key in ("source", "level", "origin", "model", "phase", "num_layers")},
        "layers": list(meta.layers),
        "num_experts": meta.num_experts,
        "top_k": meta.top_k,
        "steps_planned": planned,
        "steps_scored": scored,
        "notes": [*meta.notes, *notes],
    }


def described_cluster(cluster: Cluster) -> ResultsData:
    """The part of the entry `setting` that describes the ranks."""
    return {
        "ranks": cluster.num_ranks,
        "nodes": cluster.num_nodes,
        "redundant": cluster.num_redundant,
        "groups": cluster.num_groups,
    }


def read_results(path: Path) -> ResultsData:
    """The content of a results.json. Raises FileNotFoundError or ValueError in one line."""
    check_source(path)
    try:
        results = json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_finite, parse_float=_finite, parse_int=_whole
        )
        json.dumps(results, ensure_ascii=False).encode()  # JSON allows half of a surrogate pair, UTF-8 does not
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a results.json ({str(error)[:200]}): make it again") from None
    if isinstance(results, dict) and "kind" not in results:  # written before results had kinds
        parts = ("sweep", "comparison", "tune", "run")
        results["kind"] = next((part for part in parts if part in results), "replay")
    check_results(results, str(path))
    return cast("ResultsData", results)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > 18:  # 64 bits hold no more
        raise ValueError(f"{text[:40]} has more than 18 digits")
    return int(text)


def write_results(results: ResultsData, path: Path) -> None:
    """Writes the file whole or not at all. Raises ValueError if the results break the schema of their kind."""
    check_results(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_text(as_text(results), encoding="utf-8")


def as_text(results: ResultsData) -> str:
    """The text of results.json, with lists of numbers on one line. Raises ValueError for NaN and infinity."""
    text = json.dumps(results, indent=1, allow_nan=False)
    # JSON strings hold no line breaks, so no string is changed.
    return _NUMBERS.sub(lambda match: "[" + " ".join(match[0][1:-1].split()) + "]", text) + "\n"
