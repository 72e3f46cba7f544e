"""`epsim report`: makes the pages of a results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsim.files import folder_for_results


def report_command(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or its folder.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the pages. Default: the folder of the results."),
    ] = None,
    quality: Annotated[
        list[Path] | None,
        typer.Option(
            "--quality",
            metavar="JSON",
            help="Add charts of quality against cost from this file, which benchmarks/oea_quality.py or "
            "reader_quality.py wrote; repeatable.",
        ),
    ] = None,
) -> None:
    """Make report.html and report.md from a results.json. It may come from any command."""
    from epsim.report.frontiers import read_frontiers
    from epsim.report.write import write_pages, write_report
    from epsim.results import read_results

    path = results / "results.json" if results.is_dir() else results
    content = read_results(path)
    folder = path.parent if out is None else out
    with folder_for_results(folder):
        if quality:
            content["frontiers"] = [frontier for path in quality for frontier in read_frontiers(path)]
            write_report(content, folder)
        else:
            write_pages(content, folder)
    print(f"{folder / 'report.html'}: {content['verdict']}")
