"""The report's three forms hold the same figures as results.json, and text stays text."""

from __future__ import annotations

import base64
import errno
import hashlib
import html.parser
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.files import CannotWriteError
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.content import PEAK_OVER_MEAN, cells, headers, meanings, metrics_table, reasons, rows
from epsim.report.table import print_table
from epsim.report.write import write_pages, write_report
from epsim.results import ResultsData
from epsim.score.formulas import METRICS, metric_name
from epsim.traces.store import StoredTrace

HOSTILE = "<script>alert(1)</script> [red]|`*_$x$"


@pytest.fixture
def results(make_trace: Callable[..., StoredTrace]) -> ResultsData:
    trace = make_trace("tokens", model=HOSTILE, shared_cost=1.0)
    stacks = (("", parse_stack("eplb")), (HOSTILE, parse_stack("eplb+lplb+waterfill")))
    return replay(trace, ReplayOptions(Cluster(4, 2, 4), stacks), trace_name=HOSTILE)


class Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def test_page_and_markdown(results: ResultsData, tmp_path: Path) -> None:
    write_report(results, tmp_path)
    check_page(results, tmp_path)
    check_markdown(results, tmp_path)


def check_page(results: ResultsData, tmp_path: Path) -> None:
    """It holds the table, as text, and needs no network."""
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Cells()
    page.feed(text)
    shown = [[cell.text for cell in row] for row in cells(results, memory=True)]
    assert page.rows == [
        headers(results, memory=True),
        *shown,
        *[metrics_table(results)[1], *metrics_table(results)[2]],
    ]
    assert [row[:-1] for row in shown] == rows(results)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "alert(1)</script>" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy[1]
    assert json.loads((tmp_path / "results.json").read_text()) == results


def check_markdown(results: ResultsData, tmp_path: Path) -> None:
    """It holds the table, escaped."""
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script>" not in text
    for picture in re.findall(r"\]\((.*?)\)", text):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("| ")]
    stacks, metrics = lines[: 2 + len(results["stacks"])], lines[2 + len(results["stacks"]) :]
    assert {line.count("|") for line in stacks} == {len(headers(results)) + 1}
    _, head, body = metrics_table(results)
    assert {line.count("|") for line in metrics} == {len(head) + 1}
    assert len(metrics) == 2 + len(body)
    assert text.count(PEAK_OVER_MEAN) == 1
    for header, meaning in meanings(results):
        assert f"- {header}: {meaning}\n" in text
    for cell in rows(results)[0][1:]:
        assert f" {cell} |" in text


def test_table_prints_hostile_names_as_they_are(results: ResultsData, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(results)
    assert "[red]" in capsys.readouterr().out


def test_rows_state_values_and_intervals(results: ResultsData) -> None:
    first, second = rows(results)
    names = headers(results)
    metrics = results["stacks"][1]["metrics"]
    assert second[names.index("peak/mean")] == f"{metrics['max_over_mean']['mean']:.3f}"
    assert second[names.index("gap")] == f"{metrics['optimality_gap']['mean']:.1%}"
    assert first[-1] == "-"
    interval = results["stacks"][1]["versus_first"]["max_over_mean"]
    base = results["stacks"][0]["metrics"]["max_over_mean"]["mean"]
    assert second[-1].startswith(f"{interval['difference'] / base:+.1%} (")


def test_every_metric_stands_with_its_formula(results: ResultsData) -> None:
    table = {row[0]: row for row in metrics_table(results)[2]}
    untold = {key for keys, _ in reasons(results) for key in keys.split(", ")}
    keys = {metric_name(key): key for key in results["stacks"][0]["metrics"]}
    assert set(table) | untold == set(keys)
    assert not set(table) & untold
    for name, row in table.items():
        key = keys[name]
        total = key.removeprefix("routed_")
        of_routed = f"{metric_name(total)}, for the routed load alone"
        assert row[1] == (METRICS[total].formula if total == key else of_routed)
        mean = results["stacks"][1]["metrics"][key]["mean"]
        assert float(row[3].replace(",", "")) == pytest.approx(mean, abs=6e-3)


def test_a_full_disk_is_named(results: ResultsData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr("epsim.report.write._pages", lambda results: {"report.md": b"x"})
    with pytest.raises(CannotWriteError, match=r"report\.md: cannot be written: no space left on device"):
        write_pages(results, tmp_path)
    assert list(tmp_path.glob("*report*")) == []
