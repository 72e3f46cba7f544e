"""The table and the verdict that the README shows are what `make replay` prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from epsim.cli import named_stack
from epsim.placement.base import Cluster
from epsim.replay import ReplayOptions, replay
from epsim.report.content import headers, rows
from epsim.traces.importing import open_trace
from tests.docs.blocks import ROOT

NUMBER = re.compile(r"[-+]?\d+\.?\d*")


@pytest.mark.slow
def test_the_readme_shows_what_make_replay_prints() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    words = shlex.split(next(line for line in makefile.splitlines() if "epsim replay sample" in line))
    stacks = tuple(named_stack(words[at + 1]) for at, word in enumerate(words) if word == "--policy")
    results = replay(open_trace([Path("sample")]), ReplayOptions(Cluster(16, 2, 32), stacks), trace_name="sample")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.strip("│┃") for line in text.splitlines() if line.startswith(("│", "┃"))]
    shown = [[cell.strip() for cell in re.split("[│┃]", line)] for line in lines]
    assert shown[0] == headers(results)
    assert [row[0] for row in shown[1:]] == [row[0] for row in rows(results)]
    # Ties among equally good splits may fall otherwise when their solver changes: the last digit is free.
    for told, found in zip(shown[1:], rows(results), strict=True):
        for cell, wanted in zip(told[1:], found[1:], strict=True):
            numbers = [[float(part) for part in NUMBER.findall(one)] for one in (cell, wanted)]
            assert numbers[0] == pytest.approx(numbers[1], abs=0.5 if "%" in wanted else 0.05), (told[0], cell, wanted)
    assert results["verdict"].split(":")[0] in text
