"""`epsim report`: the pages of a results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsim.files import check_out


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
            help="Add pictures of quality against cost from this file, which benchmarks/oea_quality.py or "
            "reader_quality.py wrote; repeatable.",
        ),
    ] = None,
) -> None:
    """Make report.html and report.md from a results.json. Any command that writes one will do."""
    from epsim.report.frontiers import read_frontiers
    from epsim.report.write import write_pages, write_report
    from epsim.results import read_results

    path = results / "results.json" if results.is_dir() else results
    found = read_results(path)
    folder = path.parent if out is None else out
    check_out(folder)
    if quality:
        found["frontiers"] = [frontier for path in quality for frontier in read_frontiers(path)]
        write_report(found, folder)
    else:
        write_pages(found, folder)
    print(f"{folder / 'report.html'}: {found['verdict']}")
