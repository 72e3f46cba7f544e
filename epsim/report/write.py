"""Writes a report's files, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from epsim.files import reason, whole_file
from epsim.report.charts import figures
from epsim.report.draw import drawn
from epsim.report.markdown import markdown, pictures
from epsim.report.page import page
from epsim.results import Results, write_results


def write_report(results: Results, out: Path) -> None:
    """Writes results.json and what `write_pages` does into the folder `out`."""
    pages = _pages(results)
    write_results(results, out / "results.json")
    _write(pages, out)


def write_pages(results: Results, out: Path) -> None:
    """Writes report.html, report.md and the latter's pictures into the folder `out`."""
    _write(_pages(results), out)


def _pages(results: Results) -> dict[str, bytes]:
    drawings = [drawn(figure) for figure in figures(results)]
    texts = {"report.md": markdown(results, drawings), "report.html": page(results, drawings)}
    return {name: text.encode() for name, text in texts.items()} | pictures(drawings)


def _write(pages: dict[str, bytes], out: Path) -> None:
    for name, content in pages.items():
        try:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            with whole_file(out / name) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            raise ValueError(f"{out / name}: {reason(error)}: give another folder with --out, or make room") from None
