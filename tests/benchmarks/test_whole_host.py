"""The command for all GPUs of a host, on CPUs: every part runs under gloo, and says what is so."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.cost.calibrated import load_calibration
from epsim.models.shapes import shape_of
from tests.benchmarks.scripts import SCRIPTS, script

whole_host: Any = script("whole_host.run")
sources: Any = script("whole_host.sources")
worker: Any = script("whole_host.worker")
gates: Any = script("whole_host.gates")
common: Any = script("runtime_common")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("whole_host")
    words = [sys.executable, f"{SCRIPTS}/whole_host.py", "--ranks", "2", "--minutes", "6", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sample" in done.stdout
    found: dict[str, Any] = json.loads((out / "whole_host.json").read_text())
    return found, out


@pytest.mark.long
def test_every_part_runs_on_cpus(ran: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, out = ran
    parts = found["parts"]
    assert set(parts) == set(worker.SHARES)
    assert all(part["done"] and "failed" not in part for part in parts.values())
    assert found["num_devices"] == 2
    assert found["recordings"].startswith("none given")
    assert str(out) not in found["command"]

    stacks = 0
    for row in parts["layers-torch"]["rows"] + parts["oea"]["rows"][1:]:
        assert row["equals_replay"], row
        assert row["right"]
        for stack in row["stacks"]:
            stacks += 1
            assert stack["error"] < 1e-5
            assert set(stack["phases_us"]) == {"route", "balance", "dispatch", "experts", "combine"}
            assert stack["gain"]["difference"] == 0 or stack["stack"] != row["stacks"][0]["stack"]
            assert stack["predicted_us"]["dispatch"] > 0
    assert stacks == 2 * 2 * 6 + 4
    assert {row["source"] for row in parts["layers-torch"]["rows"]} == {"lognormal", "sample"}
    for row in [*parts["layers-deep_ep"]["rows"], parts["oea"]["rows"][0]]:
        assert row["skipped"] == "it needs GPUs"

    # Copies even out what one place for each expert does not; fewer experts are read where tokens share them.
    peak = {stack["stack"]: stack["max_over_mean"] for stack in parts["layers-torch"]["rows"][0]["stacks"]}
    assert peak["eplb+lplb"] < peak["contiguous"]
    read = {stack["stack"]: stack["bytes_read"] for stack in parts["oea"]["rows"][1]["stacks"]}
    assert read["eplb+even+pruned(k0=3)"] < read["eplb+even"]

    (moved,) = parts["relocation"]["rows"]
    assert moved["in_force"]
    assert moved["error"] < 1e-5
    assert moved["experts_moved"] == int(moved["experts_moved"]) > 0

    (killed,) = parts["kill"]["rows"]
    assert killed["said"].startswith("rank 1 stopped answering in phase dispatch, step 12, layer 0")
    assert killed["steps_kept"] == [8, 9, 10, 11]
    assert killed["right"]
    assert 0 < killed["ended_after_s"] < 30

    with tarfile.open(out / "calibrated.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (table,) = load_calibration(str(tmp_path / "calibrated")).exchange
    assert (table.implementation, table.ranks) == ("torch", 2)
    assert all(row["host_us"]["experts"] > 0 for row in parts["layers-torch"]["rows"])
    assert all("route" in stack["predicted_us"] for row in parts["layers-torch"]["rows"] for stack in row["stacks"])
    # A CPU is its own host, and has no graphs: of layers there is nothing that the model claims.
    assert {gate["gate"] for gate in found["gates"]} <= {1}


def test_gates_compare_what_is_the_device_s_alone() -> None:
    def stack(name: str, experts: float, graph: float | None) -> dict[str, Any]:
        row = {"stack": name, "predicted_us": {"route": 40.0, "experts": 900.0}, "phases_us": {"experts": experts}}
        return row if graph is None else row | {"graph_us": graph}

    hidden, hosted = stack("a", 1000.0, 1000.0), stack("b", 1000.0, 880.0)
    hosted["predicted_us"] = {"route": 40.0, "experts": 800.0}
    rows = [{"host_us": {"experts": 400.0}, "stacks": [hidden, hosted]}, {"tokens": 1, "skipped": "no time left"}]
    small = {"host_us": {"experts": 600.0}, "stacks": [stack("a", 1000.0, None)]}
    found = gates.gates_of({"layers-deep_ep": {"rows": rows}, "layers-torch": {"rows": [small]}, "oea": {"rows": rows}})
    assert [(gate["gate"], gate["cases"]) for gate in found] == [(1, 2), (2, 2), (3, 1)]
    assert found[0]["median"] == pytest.approx(0.15)
    assert found[1]["median"] == pytest.approx((0.06 + abs(840 / 880 - 1)) / 2)
    assert found[2]["ordered"] == 1.0


FAKE = """
import json, pathlib, sys, time
work, parts = pathlib.Path(sys.argv[1]), sys.argv[2:]
for part in parts:
    (work / "now").write_text(json.dumps({"part": part, "begun": time.time(), "seconds": 0.5}))
    (work / f"{part}.json").write_text(json.dumps({"rows": [{"a": 1}], "done": False, "seconds": 0}))
    if part == "calibrate":
        sys.exit("rank 1: ValueError: no such thing")
    if part == "oea":
        time.sleep(60)
    (work / f"{part}.json").write_text(json.dumps({"rows": [{"a": 2}], "done": True, "seconds": 0}))
"""


def test_a_part_that_fails_or_hangs_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(whole_host, "GRACE", 0.5)
    run = whole_host.Run(argparse.Namespace(out=tmp_path, recordings=None, minutes=1.0), 2)
    run.words = lambda parts, seconds: [sys.executable, str(fake), str(run.work), *parts]
    parts, broken = ["calibrate", "layers-torch", "oea", "relocation"], []
    begun = time.monotonic()
    while parts:
        broke = run.together(parts, 0.0)
        broken.append(broke)
        parts = [] if broke is None else parts[parts.index(broke) + 1 :]
    assert broken == ["calibrate", "oea", None]
    assert time.monotonic() - begun < 30
    found = json.loads((tmp_path / "whole_host.json").read_text())["parts"]
    assert found["calibrate"]["failed"] == "rank 1: ValueError: no such thing"
    assert found["calibrate"]["rows"] == [{"a": 1}]
    assert found["oea"]["failed"] == "took longer than its time, and was ended"
    assert found["layers-torch"]["rows"] == found["relocation"]["rows"] == [{"a": 2}]
    assert "no such thing" in (tmp_path / "calibrate.log").read_text()


def test_parts_share_the_time_that_is_left() -> None:
    parts = list(worker.SHARES)
    assert worker.share("calibrate", parts, 500.0) == pytest.approx(500 * 0.2)
    assert worker.share("kill", ["relocation", "kill"], 90.0) == pytest.approx(60.0)


def test_steps_take_tokens_of_moment_after_moment() -> None:
    ids = np.arange(30, dtype=np.int16)[:, None]
    given = ("s", "w", shape_of("tiny"), ids, torch.ones(16))
    alike = sources.Source(*given, moment=10).block(2, 2, 4)
    assert alike.expert_ids[:, 0, 0].reshape(4, 4).tolist() == [
        [0, 1, 2, 3],
        [10, 11, 12, 13],
        [20, 21, 22, 23],
        [4, 5, 6, 7],
    ]
    assert alike.source_rank.tolist() == [0, 0, 1, 1] * 4
    assert alike.token_step.tolist() == np.repeat(range(4), 4).tolist()
    on = sources.Source(*given).block(2, 4, 4)
    assert on.expert_ids[:, 0, 0].tolist() == [*range(30), 0, 1]


def test_drawn_tokens_follow_what_is_liked() -> None:
    found = sources.lognormal(shape_of("tiny"), 4000, CPU)
    counts = np.bincount(found.ids.reshape(-1), minlength=16)
    assert counts.sum() == 8000
    assert (np.diff(np.sort(found.ids, 1), axis=1) > 0).all()
    assert np.corrcoef(np.log(counts + 1), np.log(found.history.numpy()))[0, 1] > 0.9
    scored = sources.scored(shape_of("qwen3-30b-a3b-layer"), 50, CPU)
    best = np.sort(np.argsort(-scored.scores, 1)[:, :8], 1)
    assert np.array_equal(np.sort(scored.ids, 1), best)


@pytest.mark.parametrize(("size", "redundant"), [(2, 28), (4, 28), (8, 32)])
def test_slots_are_as_many_on_every_rank(size: int, redundant: int) -> None:
    assert common.redundant_on(size, common.V3) == redundant
    placement = common.placement_of("eplb", common.V3, size, redundant)
    assert placement.slots_per_rank * size == 224 + redundant
