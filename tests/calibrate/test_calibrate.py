"""`epsim calibrate` on CPUs: what it writes is what replay reads; and its parts against what they must find."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.calibrate import policies, run
from epsim.calibrate.experts import drawn_counts, received_of
from epsim.calibrate.fit import fit_tiles, non_negative, num_rows
from epsim.calibrate.folder import write_table
from epsim.calibrate.machine import Machine
from epsim.calibrate.options import Request
from epsim.calibrate.run import calibrate
from epsim.cli.main import main
from epsim.cost.calibrated import CollectiveCost, ExchangeTable, PolicyCost, PolicyTable, load_calibration, read_table
from epsim.cost.experts_time import ExpertCell, ExpertsTime, ExpertTable
from epsim.cost.router_time import RouterTable
from epsim.cost.tiled import TiledFit
from epsim.machines.hardware import load_hardware
from epsim.models.spec import load_model
from epsim.policies.base import SharedWork
from epsim.policies.joint import WaterfillJoint
from epsim.policies.stack import parse_stack
from tests.calibrate import programs
from tests.runtime.worlds import launch

CPU = Machine(torch.device("cpu"))
MODEL = """\
name = "tiny"
source = "none"
hidden = 64
intermediate = 32
shared_intermediate = 32
num_experts = 8
top_k = 2
moe_layers = 1
weight_bytes = 2.0
compute = "bf16"
dispatch = "bf16"
rest_parameters = 0
rest_us = 0
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(MODEL)
    return str(path)


def nothing(text: str) -> None: ...


@settings(max_examples=40)
@given(st.integers(1, 24), st.floats(1, 300), st.floats(0, 1.5), st.integers(0, 99))
def test_drawn_loads_have_their_mean_and_rows_hold_them(slots: int, mean: float, spread: float, seed: int) -> None:
    counts = drawn_counts(slots, mean, spread, seed)
    assert int(counts.sum()) == max(round(slots * mean), slots)
    assert int(counts.min()) >= 1
    received = received_of(CPU, counts, 8, 4, seed)
    found = received.slots
    assert torch.equal(torch.bincount(found[found >= 0], minlength=slots), counts)
    ordered = found.sort(1).values
    assert not bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()), "a row has a slot twice"


def test_tiles_are_found_from_times_that_obey_them() -> None:
    model, hardware = load_model("deepseek-v3-bf16"), load_hardware("h200")
    truth = TiledFit(256, 128, 132, (60.0, 0.02, 5.0, 20.0, 15.0, 10.0, 0.0, 8.0))
    sizes, actives = (1.0, 16.0, 100.0, 200.0, 400.0, 900.0), (1.0, 4.0, 5.0, 12.0, 19.0, 40.0)

    def draws(active: int, size: float) -> list[torch.Tensor]:
        return [drawn_counts(active, size, 0.5, draw) for draw in range(2)]

    def took(active: float, size: float) -> float:
        loads = torch.stack(draws(int(active), size)).double()
        tiles = (loads / truth.rows).ceil().sum(1)
        rows = loads.sum(1) / 1.25
        return float(truth.us(loads.sum(1), torch.full_like(tiles, active), tiles, rows, model).mean())

    us = tuple(tuple(took(active, size) for active in actives) for size in sizes)
    table = ExpertTable("GPU", "by formula", "bf16", 7168, 2048, sizes, actives, us)
    found, small = fit_tiles(table, model, draws, 132)
    assert found is not None
    assert small is None, "too few cells of small tiles"
    # Half as many tiles of twice the columns make the same waves.
    assert (found.rows, found.columns * found.at_once) == (256, 128 * 132)
    # Sizes between the grid's.
    experts = ExpertsTime(hardware, model, ExpertTable(**{**table.__dict__, "fit": found}))
    counts = drawn_counts(17, 333.0, 0.8, 9).double()
    tiles = (counts / 256).ceil().sum()
    args = counts.sum()[None], torch.tensor([17.0]).double(), tiles[None]
    assert float(experts.us(*args)) == pytest.approx(float(truth.us(*args, args[0], model)), rel=0.02)
    few = ExpertTable("GPU", "few", "bf16", 7168, 2048, sizes[:2], actives[:2], tuple(row[:2] for row in us[:2]))
    assert fit_tiles(few, model, draws, 132) == (None, None)


def test_forms_and_rows_are_found_from_times_that_obey_them() -> None:
    model = load_model("qwen3-30b-a3b")
    large = TiledFit(256, 256, 66, (60.0, 0.02, 5.0, 4.0, 15.0, 10.0, 0.0, 8.0, 0.03))
    small = TiledFit(64, 128, 132, (40.0, 0.01, 3.0, 1.0, 4.0, 3.0, 1.0, 2.0, 0.03))
    sizes, actives = (
        (1.0, 2.0, 4.0, 8.0, 12.0, 40.0, 100.0, 200.0, 400.0, 900.0),
        (1.0, 2.0, 4.0, 8.0, 12.0, 19.0, 40.0),
    )

    def draws(active: int, size: float) -> list[torch.Tensor]:
        return [drawn_counts(active, size, 0.5, draw) for draw in range(2)]

    def took(active: float, size: float, slots: float) -> float:
        loads = draws(int(active), size)
        rows = torch.tensor([float(num_rows(one, 8, slots)) for one in loads], dtype=torch.float64)
        counts = torch.stack(loads).double()
        # Eight columns a row: up to 128 for each group small tiles are taken.
        fit = small if float(rows.median()) * 8 / active < 129 else large
        tiles = (counts / fit.rows).ceil().sum(1)
        return float(fit.us(counts.sum(1), torch.full_like(tiles, active), tiles, rows, model).mean())

    us = tuple(tuple(took(active, size, 1.25) for active in actives) for size in sizes)
    cells = tuple(
        ExpertCell(size, active, 4.0, took(active, size, 4.0)) for size in (4.0, 100.0, 400.0) for active in (8.0, 19.0)
    )
    table = ExpertTable("GPU", "by formula", "bf16", 2048, 768, sizes, actives, us, cells=cells)
    found = fit_tiles(table, model, draws, 132)
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].coefficients[8] == pytest.approx(0.03, rel=0.1)
    experts = ExpertsTime(load_hardware("h200"), model, dataclasses.replace(table, fit=found[0], small=found[1]))
    for active, size, slots in ((14.0, 300.0, 4.0), (14.0, 300.0, 2.0), (14.0, 6.0, 4.0)):
        loads = draws(int(active), size)
        rows = [num_rows(one, 8, slots) for one in loads]
        given = [torch.tensor([float(value)]).double() for value in (loads[0].sum(), active, rows[0])]
        tiles = (loads[0] / experts.tile).ceil().sum()[None].double()
        fit = small if rows[0] * 8 / active < 129 else large
        true = fit.us(given[0], given[1], (loads[0] / fit.rows).ceil().sum()[None].double(), given[2], model)
        assert float(experts.us(given[0], given[1], tiles, given[2])) == pytest.approx(float(true), rel=0.03)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_non_negative_least_squares_are_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(20, 5)), rng.normal(size=20)
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    gradient = matrix.T @ (target - matrix @ found)
    # The conditions of Karush, Kuhn and Tucker.
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[found > 0]).max(initial=0) <= 1e-6


def test_a_folder_of_this_machine_is_read_by_replay_and_kept(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "here"
    lines = calibrate(Request(out, "cpu", (tiny,)), nothing, CPU)
    assert any("exchange: not measured, there is only one rank" in line for line in lines)
    found = load_calibration(str(out))
    table = found.table_for(load_model(tiny))
    assert table is not None
    assert (table.active, table.dtype, table.implementation) == ((1.0, 2.0, 8.0), "bf16", "grouped")
    assert table.date
    assert table.versions.startswith("torch")
    assert found.policies is not None
    assert {"even", "lplb", "lplb+waterfill-joint", "lplb(objective=time)", "oea", "oea-ep"} <= {
        cost.policy for cost in found.policies.costs
    }
    # Finished parts stay: none is measured again, but the one that is missing.
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "policies-4.json").unlink()
    monkeypatch.setattr(run, "expert_table", None)
    calibrate(Request(out, "cpu", (tiny,)), nothing, CPU)
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert before.keys() == after.keys()
    assert before["experts-tiny.json"] == after["experts-tiny.json"]


def test_what_cannot_be_measured_is_one_line(tmp_path: Path, tiny: str) -> None:
    with pytest.raises(ValueError, match="--base h9000: give one of b200, h100, h200, h800"):
        calibrate(Request(tmp_path / "other", "cpu", (tiny,), base="h9000"), nothing, CPU)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="--part kernels: choose experts, exchange, all-reduce, router, policies"):
        Request(tmp_path, parts=("kernels",))
    with pytest.raises(ValueError, match=r"DeepSeek-V3 computes in fp8, .* give a bf16 model \(deepseek-v3-bf16\)"):
        calibrate(Request(tmp_path / "x", "cpu", ("deepseek-v3",)), nothing, CPU)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        calibrate(Request(file, "cpu", (tiny,)), nothing, CPU)


def measured_elsewhere(**change: Any) -> str:
    table = ExpertTable(CPU.name, "", "bf16", 64, 32, (1.0,), (1.0,), ((1.0,),))
    return json.dumps(dataclasses.asdict(dataclasses.replace(table, **change)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "experts-tiny.json",
            measured_elsewhere(device="another GPU"),
            "was measured on another GPU, this is .*: give",
        ),
        # Of another name than what is asked for: it would be named beside this machine's.
        (
            "experts-mine.json",
            measured_elsewhere(device="another GPU"),
            "was measured on another GPU, this is .*: give",
        ),
        ("notes.json", '{"a": 1}', "unknown key 'a'.*: remove it, or give another --out"),
        ("experts-tiny.json", measured_elsewhere()[:40], r"not JSON .*: remove it, or give another --out"),
        ("experts-tiny.json", measured_elsewhere(hidden=128), "is not a table of tiny's 64 x 32 experts: give"),
    ],
)
def test_what_is_in_the_folder_is_checked_before_anything_is_measured(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, file: str, content: str, message: str
) -> None:
    monkeypatch.setattr(run, "expert_table", None)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message) as found:
        calibrate(Request(tmp_path, "cpu", (tiny,), ("experts",)), nothing, CPU)
    assert str(found.value).startswith(str(tmp_path / file))
    assert not (tmp_path / "hardware.toml").exists()


def test_policies_that_stay_are_told_as_what_they_were_measured_with(tmp_path: Path, tiny: str) -> None:
    cost = PolicyCost("even", 4, 4, (8.0,), (1.0,))
    write_table(PolicyTable(CPU.name, "", (cost,), num_experts=256, top_k=8), tmp_path / "policies-4.json")
    (line,) = calibrate(Request(tmp_path, "cpu", (tiny,), ("policies",)), nothing, CPU)
    assert line.endswith("policies-4.json: policies on 4 ranks, 256 experts, top-8")


def test_policies_go_on_after_the_last_one_that_was_written(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            raise KeyboardInterrupt

    request = Request(tmp_path, "cpu", (tiny,), ("policies",))
    with pytest.raises(KeyboardInterrupt):
        calibrate(request, stop, CPU)
    path = tmp_path / "policies-4.json"
    first = read_table(path)
    assert isinstance(first, PolicyTable)
    assert [cost.policy for cost in first.costs] == ["even", "static"]
    assert said[0].startswith("even, 4 ranks: ")
    monkeypatch.setattr(policies, "STACKS", policies.STACKS[:4])
    monkeypatch.setattr(policies, "ROUTERS", ())
    calibrate(request, nothing, CPU)
    whole = read_table(path)
    assert isinstance(whole, PolicyTable)
    assert [cost.policy for cost in whole.costs] == ["even", "static", "random", "lplb"]
    assert whole.costs[:2] == first.costs


def test_a_slow_policy_is_measured_once_and_at_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def slow(machine: object, model: object, stack: object, ranks: int, redundant: int, tokens: int) -> float:
        asked.append(tokens)
        return 1e6

    monkeypatch.setattr(policies, "_balance_us", slow)
    monkeypatch.setattr(policies, "STACKS", ("eplb",))
    monkeypatch.setattr(policies, "ROUTERS", ())
    monkeypatch.setattr(policies, "CPU_TOKENS", (8, 16, 64))
    (cost,) = policies.policy_costs(CPU, load_model("epsim-small"), 4, 4, (), nothing)
    assert asked == [8, 64]
    assert cost.tokens == (8.0, 64.0)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.21)

    assert CPU.eager_us([call, call, call]) > 200_000
    assert calls == 2


@pytest.mark.parametrize("stack", ["eplb+lplb+waterfill-joint", "eplb+lplb+waterfill-joint(candidates=visited)"])
def test_other_ranks_are_played_with_as_many_tokens(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of this rank, which are not that many times its own: quotas of more tokens than a rank has were followed
    past the arrays."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def looked(joint: WaterfillJoint, work: SharedWork) -> torch.Tensor:
        seen.append((work.routed, work.tokens))
        return asked(joint, work)

    asked = WaterfillJoint.token_ranks
    monkeypatch.setattr(WaterfillJoint, "token_ranks", looked)
    model = load_model("epsim-small")
    for draw in range(8):
        balancer = policies._balancer(CPU, model, parse_stack(stack), 2, 2, 64)
        ids = policies._chosen(CPU, model, 64, draw)[1]
        shared = balancer.assign(ids, 0).shared_rank
        assert shared is not None
        assert 0 <= int(shared.min()) <= int(shared.max()) < 2
        routed, tokens = seen.pop()
        assert tokens.tolist() == [[[64, 64]]]
        assert int(routed.sum()) == 2 * ids.numel()


def test_a_measurement_killed_in_a_part_leaves_what_the_next_one_goes_on_with(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGKILL: nothing that would end the part has run."""
    whole = calibrate(Request(tmp_path, "cpu", (tiny,), ("experts",)), nothing, CPU)
    (tmp_path / ".experts-tiny.json.a1b2.part").write_text("{")
    (tmp_path / "hardware.toml").unlink()
    monkeypatch.setattr(run, "expert_table", None)
    assert calibrate(Request(tmp_path, "cpu", (tiny,), ("experts",)), nothing, CPU) == whole
    assert load_calibration(str(tmp_path)).hardware.tables == ("experts-tiny.json",)


@pytest.mark.parametrize("arguments", [["--out", "x", "--part", "all"], ["--out", "x", "--device", "tpu"], []])
def test_mistakes_cost_one_line_and_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["epsim", "calibrate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("epsim: ")
    assert told.count("\n") == 1


@pytest.mark.long
def test_ranks_measure_their_exchange_together(tmp_path: Path, tiny: str) -> None:
    out = tmp_path / "group"
    launch(4, programs.measure, str(out), tiny)
    found = load_calibration(str(out))
    assert sorted(table.ranks for table in found.exchange) == [2, 4]
    for table in found.exchange:
        assert table.implementation == "torch"
        # The first size is 4 tokens a rank, each of which goes to one rank at least and at most to two: 128 bytes each.
        assert 4 * 128 <= table.dispatch_bytes[0] <= 4 * table.ranks * 128
    assert found.policies is not None
    assert sorted((one.name, one.ranks) for one in found.policies.collectives) == sorted(
        (name, ranks) for name in ("all_reduce", "all_gather") for ranks in (2, 4)
    )
    # Stopped before the last exchange: that one alone is measured.
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    (out / "exchange-tiny-torch-4.json").unlink()
    lines = launch(4, programs.measure, str(out), tiny)
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert sorted(name for name in again if again[name] != times[name]) == ["exchange-tiny-torch-4.json"]
    assert [line.rpartition(" by ")[2] for line in lines[0]][:2] == ["torch, 2 ranks", "torch, 4 ranks"]


@pytest.mark.slow
def test_what_the_first_rank_finds_wrong_every_rank_tells_and_other_groups_collectives_stay(
    tmp_path: Path, tiny: str
) -> None:
    """Nobody waits for a rank that has given up, whatever it was doing."""
    experts = ExpertTable("another GPU", "", "bf16", 64, 32, (1.0,), (1.0,), ((1.0,),))
    router = RouterTable(CPU.name, "", 64, 16, 2, 1, 1, (4.0,), (1.0,), (1.0,))
    exchange = ExchangeTable(CPU.name, "", "torch", "bf16", 2, 1, (1.0,), (1.0,), (1.0,), (1.0,), hidden=128)
    elsewhere = tuple(CollectiveCost(name, 3, 1, 77.0) for name in ("all_reduce", "all_gather"))
    for name, table in (
        ("experts/experts-tiny.json", experts),
        ("router/router-tiny.json", router),
        ("exchange/exchange-tiny-torch-2.json", exchange),
        ("kept/collectives.json", PolicyTable(CPU.name, "", collectives=elsewhere)),
    ):
        (tmp_path / name).parent.mkdir()
        write_table(table, tmp_path / name)
    first, second = launch(2, programs.refused, str(tmp_path), tiny)
    assert first == second
    assert "was measured on another GPU" in first[0]
    assert "is not a table of tiny's router, 8 experts, top-2" in first[1]
    assert "is not a table of tiny's rows of 64" in first[2]
    assert first[3].endswith("all-reduce and all-gather of counts")
    found = read_table(tmp_path / "kept/collectives.json")
    assert isinstance(found, PolicyTable)
    assert [(one.name, one.ranks) for one in found.collectives] == [
        ("all_reduce", 2), ("all_gather", 2), ("all_reduce", 3), ("all_gather", 3),
    ]  # fmt: skip
    assert found.collectives[2:] == elsewhere
