"""Writes a report's three files, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from epsim.report.markdown import markdown
from epsim.report.page import page
from epsim.results import Results, write_results
from epsim.traces.files import whole_file


def write_report(results: Results, out: Path) -> None:
    """Writes results.json, report.md and report.html into the folder `out`."""
    texts = {"report.md": markdown(results), "report.html": page(results)}
    write_results(results, out / "results.json")
    for name, text in texts.items():
        with whole_file(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
