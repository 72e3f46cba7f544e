"""Two nodes: processes in network namespaces of their own, with nothing but a wire between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epsim.results import read_results
from epsim.runtime.telemetry import read_rank
from epsim.traces.store import StoredTrace
from tests.launch.processes import LIMIT, TORCHRUN, environment, start

pytestmark = pytest.mark.long


def ip(*arguments: str) -> int:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode


@pytest.fixture
def two_nodes() -> Iterator[list[str]]:
    """Names of two namespaces, joined by a pair of virtual interfaces: 10.231.0.1 and 10.231.0.2."""
    names = [f"epsim-{os.getpid()}-{side}" for side in "ab"]
    wires = [f"ep{os.getpid() % 100_000}{side}" for side in "ab"]
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    try:
        if ip("netns", "add", names[0]) or ip("netns", "add", names[1]):
            pytest.skip("network namespaces cannot be made here")
        if ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1]):
            pytest.skip("virtual interfaces cannot be made here")
        for number, (name, wire) in enumerate(zip(names, wires)):
            assert not ip("link", "set", wire, "netns", name, "name", "wire")
            assert not ip("-n", name, "addr", "add", f"10.231.0.{number + 1}/24", "dev", "wire")
            assert not ip("-n", name, "link", "set", "wire", "up")
            assert not ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)
        ip("link", "del", wires[0])


def test_two_nodes_meet_and_run(two_nodes: list[str], make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=6, shared_cost=1.0)
    running = []
    for number, name in enumerate(two_nodes):
        meet = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
        # Both have the machine's name, so that which of them holds the meeting place must be said.
        meet += ["--rdzv-endpoint", "10.231.0.1:29431", "--rdzv-conf", f"is_host={int(number == 0)}"]
        meet += ["--local-addr", f"10.231.0.{number + 1}"]
        worker = ["-m", "epsim.launch.worker", str(trace.path), "--model", "tiny", "--nodes", "2", "--redundant", "4"]
        worker += ["--policy", "eplb", "--policy", "eplb+lplb(counts=gathered)+waterfill"]
        worker += ["--out", str(tmp_path / f"node{number}")]
        command = ["ip", "netns", "exec", name, *TORCHRUN, *meet, *worker]
        running.append(start(command, environment(GLOO_SOCKET_IFNAME="wire")))
    for process in running:
        _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
    results = read_results(tmp_path / "node0" / "results.json")
    assert (results["setting"]["ranks"], results["setting"]["nodes"]) == (4, 2)
    assert results["run"]["equals_replay"] is True
    assert results["stacks"][0]["metrics"]["remote_node_share"]["mean"] > 0
    # Each node keeps its own ranks' telemetry; rank 0 had all of it.
    for number in range(2):
        folder = tmp_path / f"node{number}" / "telemetry"
        assert sorted(path.name for path in folder.iterdir()) == [
            f"rank-0000{2 * number + i}.parquet" for i in range(2)
        ]
        assert read_rank(folder, 2 * number).num_rows == 3 * 2 * 2
    assert not (tmp_path / "node1" / "results.json").exists()
