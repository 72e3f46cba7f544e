"""Compares the results of two versions of epsim, number by number, to the last bit.

    python benchmarks/same_results.py OLD/.venv/bin/python NEW/.venv/bin/python [--except PATTERN ...]

Each interpreter runs the same commands in its own version: the replay of `make replay`, a replay of the sample as a
trace of counts, replays with `--hardware h200` and with router policies, a tune, and a run of two gloo ranks.
Every value of their results.json is compared, except texts of several words, the times that a run measures, and values
whose path matches a pattern: `*:kind`, or `run:stacks.*_us*` for one command alone. Prints the path of each value that
differs, and exits with 1 if there is any.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from common import script_parser

CLUSTER = ("--ranks", "16", "--nodes", "2", "--redundant", "32")
STACKS = ("contiguous", "eplb", "eplb+lplb", "eplb+lplb+waterfill", "searched+lplb")
GATHERED = "searched+lplb(counts=gathered)+waterfill"
SPLITS = ("contiguous", "eplb", "eplb+lplb-sampled", "eplb+lplb-ipm", "eplb+one-copy")
ROUTERS = ("eplb+oea(k0=4)", "eplb+oea(k0=4)+lplb", "contiguous+oea-ep(k0=2)+one-copy")
TIMED = ("--hardware", "h200", "--model", "epsim-small")
RUN = ("--model", "tiny", "--steps", "6", "--launcher", "torchrun", "--ranks", "2", "--redundant", "8")
COMMANDS: dict[str, tuple[str, ...]] = {
    "replay": ("replay", "sample", *CLUSTER, *(f"--policy={stack}" for stack in (*STACKS, GATHERED))),
    "counts": ("replay", "COUNTS", *CLUSTER, *(f"--policy={stack}" for stack in ("contiguous", "eplb", "eplb+lplb"))),
    "timed": ("replay", "sample", *CLUSTER, *TIMED, *(f"--policy={stack}" for stack in (*STACKS, GATHERED))),
    "splits": ("replay", "sample", *CLUSTER, *TIMED, *(f"--policy={stack}" for stack in SPLITS)),
    "routers": ("replay", "sample", *CLUSTER, *TIMED, *(f"--policy={stack}" for stack in ROUTERS)),
    "tune": ("tune", "sample", *TIMED, "--gpus", "16", "--nodes", "2"),
    "tune counts": ("tune", "COUNTS", *TIMED, "--gpus", "16", "--nodes", "2"),
    "run": ("run", "sample", *RUN, "--policy=contiguous", "--policy=eplb+lplb", "--policy=eplb+oea(k0=4)+waterfill"),
}
MEASURED = ("run:stacks.*_us*", "run:stacks.*throughput_gain*")


def write_counts(target: Path) -> None:
    """The sample, as a trace of counts."""
    import dataclasses

    from epsim.traces.importing import open_trace
    from epsim.traces.options import ImportOptions
    from epsim.traces.store import TraceWriter
    from epsim.traces.trace import TokenBlock

    sample = open_trace(["sample"], ImportOptions())
    meta = dataclasses.replace(sample.meta, level="counts", num_source_ranks=0, num_scores=0)
    with TraceWriter(target, meta) as writer:
        for block in sample.blocks(0, sample.num_steps):
            assert isinstance(block, TokenBlock)
            writer.append(block.to_counts(meta.num_experts))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value with its path, such as `replay:stacks.0.metrics.peak.mean`."""
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, f"{path}.{key}" if not path.endswith(":") else f"{path}{key}")


def results(python: str, name: str, arguments: tuple[str, ...], trace: Path, out: Path) -> dict[str, Any]:
    """The values of one command's results.json by path."""
    words = [str(trace) if word == "COUNTS" else word for word in arguments]
    out.mkdir(parents=True)  # where it runs: in a checkout, `-m` would take the epsim of that checkout
    command = [python, "-m", "epsim.cli", *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    if done.returncode:
        raise SystemExit(f"{python}: {name} failed\n{done.stderr or done.stdout}")
    values = leaves(json.loads((out / "results.json").read_text()), f"{name}:")
    return {path: value for path, value in values if not (isinstance(value, str) and " " in value)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("old", type=os.path.abspath, help="Python of the first version")
    parser.add_argument("new", type=os.path.abspath, help="Python of the second version")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--except", nargs="+", dest="excepted", default=[], metavar="PATTERN")
    arguments = parser.parse_args()
    patterns = (*MEASURED, *arguments.excepted)
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "counts.parquet")
        write_counts(trace)
        for name in arguments.only:
            old, new = (
                results(python, name, COMMANDS[name], trace, Path(folder, side, name))
                for side, python in (("old", arguments.old), ("new", arguments.new))
            )
            absent = object()
            paths = [
                path
                for path in dict.fromkeys((*old, *new))
                if repr(old.get(path, absent)) != repr(new.get(path, absent))
                and not any(fnmatch(path, pattern) for pattern in patterns)
            ]
            for path in paths:
                print(f"{path}: {old.get(path, 'absent')} -> {new.get(path, 'absent')}")
            print(f"{name}: {len(old):,} values, {len(paths)} differ", flush=True)
            differing += len(paths)
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
