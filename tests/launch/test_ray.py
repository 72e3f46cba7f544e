"""Gangs of Ray actors on a cluster of this machine alone."""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epsim.launch.options import RunOptions
from epsim.launch.ray_job import Seat, _join_cluster, _placement_group, by_node, gpus_of, seated, with_ranks
from epsim.options import parse_words
from epsim.results import read_results
from epsim.runtime.beats import INTERVAL
from epsim.runtime.telemetry import read_telemetry
from epsim.traces.store import StoredTrace
from tests.launch.processes import EPSIM, await_place, environment, run, start, survivors

pytest.importorskip("ray", reason="Ray is not installed")

TraceMaker = Callable[..., StoredTrace]


def options(**more: Any) -> RunOptions:
    given: dict[str, Any] = {"trace": "sample", "model": "tiny", "policies": ("eplb",), "out": Path("x")}
    return RunOptions(**given | more)


@pytest.mark.parametrize(
    ("given", "gpus", "cpus", "ranks", "device"),
    [
        ({}, 2, None, 2, "cuda"),
        ({}, None, 3, 3, "cpu"),
        ({"ranks": 5}, None, None, 5, "cpu"),
        ({"ranks": 2, "device": "cuda"}, None, None, 2, "cuda"),
        ({"ranks": 2}, 2, None, 2, "cuda"),
    ],
)
def test_what_ray_reserves(given: dict[str, Any], gpus: int | None, cpus: int | None, ranks: int, device: str) -> None:
    """The command that results name does the same again."""
    asked = with_ranks(options(launcher="ray", **given), gpus, cpus)
    assert (asked.ranks, asked.device) == (ranks, device)
    assert with_ranks(parse_words(RunOptions, asked.arguments()), None, None) == asked


@pytest.mark.parametrize(
    ("given", "gpus", "cpus", "words"),
    [
        ({}, 1, 1, "give --gpus or --cpus, not both"),
        ({}, 0, None, "--gpus 0: give at least 1"),
        ({}, None, 0, "--cpus 0: give at least 1"),
        ({}, None, None, "give --gpus N or --cpus N, the number of ranks"),
        ({"device": "cpu"}, 2, None, "--gpus with --device cpu: give --cpus"),
        ({"device": "cuda"}, None, 2, "--cpus with --device cuda: give --gpus"),
        ({"ranks": 3}, 2, None, "--ranks 3 with --gpus 2: give one of them"),
    ],
)
def test_what_contradicts_itself(given: dict[str, Any], gpus: int | None, cpus: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_ranks(options(**given), gpus, cpus)


def test_ranks_of_a_node_follow_one_another_and_see_each_others_gpus() -> None:
    """Wherever Ray put its bundles: a rank's own GPU is the one of its number on the node."""
    given = [("b", "3"), ("a", "0"), ("b", "1"), ("a", "7"), ("b", "GPU-5")]
    seats = [Seat(node, (gpu,)) for node, gpu in given]
    order = by_node(seats)
    assert order == [0, 2, 4, 1, 3]
    seats = [seats[place] for place in order]
    members = seated(seats, "host", 1, 2)
    assert [(one.rank, one.local_rank, one.local_size) for one in members] == [
        (0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 2), (4, 1, 2),
    ]  # fmt: skip
    assert {(one.num_ranks, one.attempt) for one in members} == {(5, 2)}
    for member, seat in zip(members, seats, strict=True):
        assert gpus_of(seats, seat.node)[member.local_rank] == seat.gpus[0]
    assert gpus_of(seats, "a") == ["0", "7"]


class FakeRay:
    """What `ray.init` is asked for."""

    def __init__(self) -> None:
        self.asked = ""

    def init(self, address: str, **more: Any) -> None:
        """Ray installs a signal handler of its own."""
        self.asked = address
        signal.signal(signal.SIGTERM, lambda number, frame: None)


def test_which_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, even where one runs on this machine, unless an address is given; told at once where nobody answers."""
    before = signal.getsignal(signal.SIGTERM)
    for name in ("RAY_JOB_ID", "RAY_USAGE_STATS_ENABLED", "RAY_IGNORE_UNHANDLED_ERRORS"):
        monkeypatch.setenv(name, "")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(OSError, match=rf"RAY_ADDRESS {address}: no cluster answers there \(connection refused\)"):
            _join_cluster(FakeRay(), 2)
        listening.listen()
        there = FakeRay()
        assert _join_cluster(there, 2)
        assert there.asked == "auto"
    for given in ("", "local"):
        monkeypatch.setenv("RAY_ADDRESS", given)
        own = FakeRay()
        assert not _join_cluster(own, 2)
        assert own.asked == "local"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_sigterm_to_the_launcher(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace, out = make_trace("tokens", steps=6), tmp_path / "out"
    command: list[str | Path] = [*EPSIM, "run", trace.path, "--model", "tiny", "--policy", "contiguous", "--out", out]
    sleeps = environment(EPSIM_TRIAL_FAULT="sleep:rank=1,step=3,layer=1,phase=balance")
    process = start([*command, "--launcher", "ray", "--cpus", "2", "--timeout", "600"], sleeps)
    await_place(out / "telemetry", 1, "balance 3 1")
    time.sleep(2 * INTERVAL)  # until it has beaten there
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "epsim: stopped by SIGTERM; rank 1 was in phase balance, step 3, layer 1\n"
    assert sorted(set(read_telemetry(out / "telemetry")["step"].to_pylist())) == [0, 1, 2]
    assert not survivors(out)


def test_gpus_that_are_not_there() -> None:
    """A cluster of this machine alone is not waited for."""
    never = SimpleNamespace(wait=lambda seconds: False)
    util = SimpleNamespace(placement_group=lambda bundles, strategy: never)
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 1.0}, util=util)
    with pytest.raises(
        ValueError, match="2 GPUs are needed, but the cluster has 1, or others use them: give fewer ranks"
    ):
        _placement_group(ray, 2, True, False)


@pytest.mark.slow
def test_a_gang_that_lost_a_rank_goes_on(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=12, shared_cost=1.0)
    out = tmp_path / "out"
    stacks = ["--model", "tiny", "--policy", "contiguous", "--policy", "eplb+lplb", "--redundant", "2"]
    command: list[str | Path] = [*EPSIM, "run", trace.path, *stacks, "--launcher", "ray", "--cpus", "2", "--out", out]
    done = run(command, environment(EPSIM_TRIAL_FAULT="kill:rank=1,step=8,layer=1,phase=dispatch"))
    assert done.code == 0, done.err
    assert len(done.lines) == 1
    assert done.lines[0].startswith("epsim: rank 1 stopped answering in phase dispatch, step 8, layer 1 (rank 0 rep")
    assert done.lines[0].endswith("; starting again after the last complete step (1 of 2)")
    table = read_telemetry(out / "telemetry")
    rows = [tuple(row) for row in zip(*(table[name].to_pylist() for name in ("step", "stack", "layer", "rank")))]
    assert rows == list(itertools.product(range(6, 12), range(2), range(2), range(2)))
    assert read_results(out / "results.json")["run"]["equals_replay"] is True


@pytest.mark.long
def test_sixteen_ranks(make_trace: TraceMaker, tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=4, experts=32, tokens=64, ranks=16, shared_cost=1.0)
    out = tmp_path / "out"
    stacks = ["contiguous", "eplb+lplb", "eplb+lplb(counts=gathered)+waterfill"]
    policies = [part for stack in stacks for part in ("--policy", stack)]
    shape = ["--model", "tiny", *policies, "--redundant", "16", "--nodes", "2"]
    command: list[str | Path] = [*EPSIM, "run", trace.path, *shape, "--launcher", "ray", "--cpus", "16"]
    done = run([*command, "--out", out])
    assert (done.code, done.err) == (0, "")
    results = read_results(out / "results.json")
    assert results["setting"]["ranks"] == 16
    assert results["run"]["equals_replay"] is True
    assert read_telemetry(out / "telemetry").num_rows == 2 * 3 * 2 * 16
