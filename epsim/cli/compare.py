"""`epsim compare`: compares results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from epsim.cli.options import JsonOption, OutOption, command_line
from epsim.files import check_out, folder_for_results


def compare_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="results.json files or their folders. The first is the baseline."),
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="CONDITION",
            help='Exit with code 1 if the last file meets this, e.g. "NAME.peak/mean.mean > 1.05"; repeatable.',
        ),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="METRIC", help="Show only this metric; repeatable.")
    ] = None,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare results, with intervals. For the folder of a single run, compare measured with predicted values."""
    from epsim.report.compare import combined, compare, read_sides
    from epsim.report.conditions import holds, parse_condition
    from epsim.score.formulas import metric_key, metric_name

    conditions = [parse_condition(text) for text in fail_if or ()]
    check_out(out)
    sides = read_sides(files)
    single = len(sides) == 1 and len(sides[0].results["stacks"]) == 1
    rows = [] if single and conditions else compare(sides)
    keys = dict.fromkeys(row.metric for row in rows)
    shown = {name: metric_key(name, keys) for name in metric or ()}
    for name, key in shown.items():
        if key is None:
            raise ValueError(f"--metric {name}: give one of {', '.join(map(metric_name, keys))}")
    checked = [(condition, *holds(condition, sides, rows)) for condition in conditions]
    results = combined(sides, rows, command_line())
    if out is not None:
        from epsim.report.write import write_report

        with folder_for_results(out):
            write_report(results, Path(out))
    if json_output:
        import json

        print(json.dumps(results["comparison"], indent=1))
    elif rows:
        from epsim.report.table import print_comparison

        print_comparison([row for row in rows if not metric or row.metric in shown.values()], sides, results["verdict"])
    failed = False
    for condition, is_so, value in checked:
        failed |= is_so
        stream = sys.stderr if is_so else sys.stdout
        print(f"epsim: {'fails' if is_so else 'passes'}: {condition.text} (it is {value:.6g})", file=stream)
    if failed:
        raise typer.Exit(1)
