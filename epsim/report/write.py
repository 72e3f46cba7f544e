"""Writes the files of a report. Each is written whole or not at all."""

from pathlib import Path

from epsim.files import whole_file
from epsim.report.draw import drawn
from epsim.report.markdown import markdown, pictures
from epsim.report.page import page
from epsim.report.views import view_of
from epsim.results import ResultsData, write_results


def write_report(results: ResultsData, out: Path) -> None:
    """Writes results.json, report.html, report.md and its pictures into the folder `out`."""
    pages = _pages(results)
    write_results(results, out / "results.json")
    _write(pages, out)


def write_pages(results: ResultsData, out: Path) -> None:
    """The same without results.json."""
    _write(_pages(results), out)


def _pages(results: ResultsData) -> dict[str, bytes]:
    drawings = [drawn(figure) for figure in view_of(results).figures(results)]
    texts = {"report.md": markdown(results, drawings), "report.html": page(results, drawings)}
    return {name: text.encode() for name, text in texts.items()} | pictures(drawings)


def _write(pages: dict[str, bytes], out: Path) -> None:
    for name, content in pages.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out / name) as temporary:
            temporary.write_bytes(content)
