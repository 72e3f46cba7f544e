"""`epsim compare` and `epsim report`: what results.json files say, side by side or as pages."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer


def compare_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="results.json files or their folders; the first is the base."),
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="CONDITION",
            help='Exit with 1 where it holds of the last file: "NAME.max_over_mean.mean > 1.05"; repeatable.',
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="KEY", help="Show only this metric; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write results.json, report.md and report.html there.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON instead.")] = False,
) -> None:
    """Set results side by side, with intervals; of a run's folder alone, what was predicted and what was measured."""
    from epsim.report.compare import combined, compare, read_sides
    from epsim.report.conditions import holds, parse_condition

    conditions = [parse_condition(text) for text in fail_if or ()]
    if out is not None:
        from epsim.cli.main import check_out

        check_out(out)
    sides = read_sides(files)
    single = len(sides) == 1 and len(sides[0].results["stacks"]) == 1
    rows = [] if single and conditions else compare(sides)
    unknown = next((key for key in metric or () if key not in {row.metric for row in rows}), None)
    if unknown is not None:
        raise ValueError(f"--metric {unknown}: not here; there are {', '.join(dict.fromkeys(r.metric for r in rows))}")
    found = [(condition, *holds(condition, sides, rows)) for condition in conditions]
    results = combined(sides, rows, shlex.join(["epsim", *sys.argv[1:]]))
    if out is not None:
        from epsim.report.write import write_report

        write_report(results, out)
    if json_output:
        import json

        print(json.dumps(results["comparison"], indent=1))
    elif rows:
        from epsim.report.table import print_comparison

        print_comparison([row for row in rows if not metric or row.metric in metric], sides, results["verdict"])
    failed = False
    for condition, is_so, value in found:
        failed |= is_so
        stream = sys.stderr if is_so else sys.stdout
        print(f"epsim: {'fails' if is_so else 'holds not'}: {condition.text} (it is {value:.6g})", file=stream)
    if failed:
        raise typer.Exit(1)


def report_command(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or its folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where pages go. Default: beside the results.")
    ] = None,
    quality: Annotated[
        list[Path] | None,
        typer.Option(
            "--quality",
            metavar="JSON",
            help="Add frontiers that benchmarks/oea_quality.py or reader_quality.py wrote; repeatable.",
        ),
    ] = None,
) -> None:
    """Make report.html and report.md from a results.json of replay, run, compare, tune or sweep."""
    from epsim.cli.main import check_out
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
