"""Comparisons: differences, whether their intervals are paired, and conditions for CI."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsim.cli.main import main
from epsim.files import message_line
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.compare import Row, Side, combined, compare, read_sides, words
from epsim.report.conditions import OF_A_PAIR, OF_A_STACK, Condition, holds, parse_condition
from epsim.report.content import headers
from epsim.results import ResultsData, check_results, write_results
from epsim.score.formulas import METRICS, metric_name
from epsim.score.statistics import paired_difference, unpaired_difference
from epsim.traces.store import StoredTrace

TraceMaker = Callable[..., StoredTrace]


def replayed(trace: StoredTrace, *stacks: str, ranks: int = 4) -> ResultsData:
    named = tuple((f"s{number}", parse_stack(text)) for number, text in enumerate(stacks))
    return replay(trace, ReplayOptions(Cluster(ranks, 1, ranks), named, plan_share=0.25))


def row_of(rows: list[Row], metric: str = "max_over_mean") -> Row:
    (found,) = (row for row in rows if row.metric == metric)
    return found


def test_the_same_steps_are_paired_and_give_the_replays_own_interval(make_trace: TraceMaker) -> None:
    trace = make_trace("tokens", steps=40)
    both = replayed(trace, "eplb", "eplb+lplb")
    rows = compare([Side("x", both)])
    apart = [replayed(trace, text) for text in ("eplb", "eplb+lplb")]
    for row in (row_of(rows), row_of(compare([Side("a", apart[0]), Side("b", apart[1])]))):
        wanted = both["stacks"][1]["versus_first"]["max_over_mean"]
        assert row.how == "paired"
        assert row.difference == pytest.approx(wanted["difference"], rel=1e-9)
        # steps are kept to seven digits
        assert [row.low, row.high] == pytest.approx([wanted["low"], wanted["high"]], rel=1e-4)
    remote = row_of(rows, "remote_rank_share")
    assert remote.first == both["stacks"][0]["metrics"]["remote_rank_share"]["mean"]


def test_other_steps_are_unpaired(make_trace: TraceMaker) -> None:
    traces = [make_trace("tokens", steps=30, seed=seed, name=f"{seed}.parquet") for seed in (0, 1)]
    rows = compare([Side(str(n), replayed(trace, "contiguous")) for n, trace in enumerate(traces)])
    row = row_of(rows)
    assert row.how == "unpaired"
    assert row.difference is not None
    assert row.low is not None
    assert row.high is not None
    assert row.low < row.difference < row.high


def test_unpaired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        ours, theirs = rng.normal(1.0, 0.3, 60), rng.normal(0.7, 0.6, 90)
        found = unpaired_difference((ours, np.ones(60)), (theirs, np.ones(90)), trial)
        assert found["difference"] == pytest.approx(ours.mean() - theirs.mean())
        assert found["low"] is not None
        assert found["high"] is not None
        held += found["low"] <= 0.3 <= found["high"]
    assert 0.90 <= held / 200 <= 0.99
    same = rng.normal(1.0, 0.3, 60)
    paired = paired_difference(same + 0.1 - same, np.ones(60), 0)
    unpaired = unpaired_difference((same + 0.1, np.ones(60)), (same, np.ones(60)), 0)
    assert paired["low"] == pytest.approx(0.1)
    assert unpaired["low"] is not None
    assert unpaired["low"] < 0.0  # which pairing alone could tell from zero


def test_one_step_has_a_difference_and_no_interval(make_trace: TraceMaker) -> None:
    trace = make_trace("counts", steps=1)
    row = row_of(compare([Side("x", replayed(trace, "contiguous", "contiguous+even"))]))
    assert (row.difference, row.low, row.how) == (0.0, None, "none")


def test_a_comparison_is_a_results_json(make_trace: TraceMaker, tmp_path: Path) -> None:
    sides = [
        Side("a", replayed(make_trace("tokens"), "eplb", "eplb+lplb")),
        Side("b", replayed(make_trace("tokens", seed=3, steps=9, name="b.parquet"), "eplb", "eplb+lplb", ranks=8)),
    ]
    found = combined(sides, compare(sides), "epsim compare a b")
    check_results(found)
    assert [entry["name"] for entry in found["stacks"]] == ["s0 (a)", "s1 (a)", "s0 (b)", "s1 (b)"]
    assert [file["steps"] for file in found["comparison"]["files"]] == [4, 7]
    assert "load_over_mean_by_rank" not in found["stacks"][0]  # of other ranks on either side


def test_files_and_folders(make_trace: TraceMaker, tmp_path: Path) -> None:
    results = replayed(make_trace("counts"), "eplb", "contiguous")
    write_results(results, tmp_path / "results.json")
    assert [side.name for side in read_sides([tmp_path])] == [str(tmp_path / "results.json")]
    write_results(results, tmp_path / "predicted.json")
    predicted, measured = read_sides([tmp_path])
    assert (Path(predicted.name).name, Path(measured.name).name) == ("predicted.json", "results.json")
    with pytest.raises(ValueError, match="--policy NAME=STACK"):
        other = replayed(make_trace("counts"), "eplb+lplb", "contiguous")
        for number, entry in enumerate(other["stacks"]):
            entry["name"] = f"other{number}"
        compare([predicted, Side("y", other)])


def test_words_say_what_differs_most() -> None:
    def row(name: str, second: float, low: float | None, high: float | None) -> Row:
        return Row(name, "a", name, "b", "max_over_mean", "ratio", 2.0, second, second - 2.0, low, high, "paired")

    assert words([row("x", 1.9, -0.2, 0.0), row("y", 1.0, -1.1, -0.9)]) == (
        "Peak/mean differs most for y: 1.000 against 2.000 (-50.0%, 95% interval -55.0% to -45.0%, paired)."
    )
    assert words([row("x", 1.9, -0.2, 0.1)]).endswith("; the interval includes zero.")
    assert words([row("x", 2.0, 0.0, 0.0), row("y", 2.0, 0.0, 0.0)]) == "Peak/mean is the same for each of 2 stacks."
    time = replace(row("x", 1.5, -0.6, -0.4), metric="layer_time_us")
    assert words([row("x", 2.0, 0.0, 0.0), time]) == (
        "Peak/mean is the same for x. "
        "Layer time (us) of x: 1.5 against 2.0 (-25.0%, 95% interval -30.0% to -20.0%, paired)."
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("best.max_over_mean.mean > 1.05", ("best", "max_over_mean", "mean", ">", 1.05)),
        ("best.routed peak/mean.mean > 1", ("best", "routed peak/mean", "mean", ">", 1.0)),
        ("eplb+oea(k0=3,p=0.7).peak.p95<=1e3", ("eplb+oea(k0=3,p=0.7)", "peak", "p95", "<=", 1000.0)),
        (" a b.layer_time_us.high >= -2", ("a b", "layer_time_us", "high", ">=", -2.0)),
    ],
)
def test_conditions_are_read(text: str, parts: tuple[str, str, str, str, float]) -> None:
    assert parse_condition(text) == Condition(text, *parts)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("best.max_over_mean > 1", "NAME.METRIC.STATISTIC"),
        ("best.max_over_mean.mean = 1", "NAME.METRIC.STATISTIC"),
        ("best.max_over_mean.median > 1", "p95"),
        ("best.max_over_mean.mean > one", "not a number"),
        ("best.max_over_mean.mean > nan", "nan"),
        ("", "NAME.METRIC.STATISTIC"),
    ],
)
def test_bad_conditions(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_condition(text)


PIECES = st.sampled_from(
    ["best", ".", "max_over_mean", "mean", "low", " ", ">", "<=", "=", "1.05", "1e999", "nan", "\n"]
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=9).map("".join)))
def test_whatever_is_written_is_a_condition_or_one_line(text: str) -> None:
    said = ""
    try:
        found = parse_condition(text)
    except ValueError as error:
        said = message_line(str(error))
    if said:
        assert "--fail-if" in said
        assert len(said.splitlines()) == 1
    else:
        assert found.statistic in OF_A_STACK + OF_A_PAIR
        assert found.number == found.number


def test_conditions_hold_or_not(make_trace: TraceMaker) -> None:
    sides = [Side("x", replayed(make_trace("tokens", steps=20), "contiguous", "eplb+lplb"))]
    rows = compare(sides)
    value = sides[0].results["stacks"][1]["metrics"]["max_over_mean"]["p95"]
    assert holds(parse_condition(f"s1.max_over_mean.p95 >= {value!r}"), sides, rows) == (True, value)
    assert not holds(parse_condition(f"eplb+lplb.max_over_mean.p95 > {value!r}"), sides, rows)[0]
    assert holds(parse_condition("s1.max_over_mean.high < 0"), sides, rows)[0]
    for key, metric in sides[0].results["stacks"][1]["metrics"].items():  # tables and results.json name a metric alike
        if metric["mean"] is not None:
            name = metric_name(key)
            assert holds(parse_condition(f"s1.{name}.mean != 9e99"), sides, rows) == (True, metric["mean"])
            assert holds(parse_condition(f"s1.{key}.mean != 9e99"), sides, rows) == (True, metric["mean"])
    headings = {heading.split(" (")[0] for heading in headers(sides[0].results)}
    assert headings - {"stack", "p95", "vs first"} < {metric_name(key) for key in METRICS}
    for text, word in (
        ("none.peak.mean > 0", "only s0, s1"),
        ("s1.speed.mean > 0", "no metric 'speed'; there are peak, mean_load, peak/mean, "),
        ("s1.layer_time_us.mean > 0", "no times are predicted without --hardware"),
        ("s0.peak.low > 0", "it is the first"),
    ):
        with pytest.raises(ValueError, match=word):
            holds(parse_condition(text), sides, rows)


@pytest.mark.parametrize(
    ("condition", "code", "word"),
    [
        ("s0.max_over_mean.mean > 1", 1, "fails: s0.max_over_mean.mean > 1 (it is"),
        ("s0.max_over_mean.mean > 99", 0, ""),
        ("s0.max_over_mean.mean", 2, "NAME.METRIC.STATISTIC"),
        ("s9.max_over_mean.mean > 1", 2, "no stack 's9'"),
    ],
)
def test_exit_codes(
    make_trace: TraceMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    condition: str, code: int, word: str,
) -> None:  # fmt: skip
    path = tmp_path / "results.json"
    write_results(replayed(make_trace("counts"), "eplb"), path)
    monkeypatch.setattr(sys, "argv", ["epsim", "compare", str(path), "--fail-if", condition])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    err = capsys.readouterr().err
    assert err.count("\n") == (code > 0)
    assert word in err


def test_report_makes_the_pages_again(
    make_trace: TraceMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(replayed(make_trace("counts"), "eplb", "contiguous"), tmp_path / "results.json")
    before = json.loads((tmp_path / "results.json").read_text())
    monkeypatch.setattr(sys, "argv", ["epsim", "report", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert before["verdict"] in capsys.readouterr().out
    assert before["verdict"] in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "results.json").read_text()) == before
