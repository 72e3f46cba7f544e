"""The command line's app, with all its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from epsim.cli.calibrate import calibrate_command
from epsim.cli.compare import compare_command
from epsim.cli.model import app as model_app
from epsim.cli.options import command
from epsim.cli.plan import plan_command
from epsim.cli.reader import app as reader_app
from epsim.cli.replay import replay_command
from epsim.cli.report import report_command
from epsim.cli.reproduce import app as reproduce_app
from epsim.cli.run import run_command
from epsim.cli.sweep import sweep_command
from epsim.cli.traces import app as traces_app
from epsim.cli.tune import tune_command
from epsim.version import VERSION

HELP = "Expert-parallel load balancing for mixture-of-experts models: which policy is best, and by how much?"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=HELP)
for name, group in {"traces": traces_app, "model": model_app, "reproduce": reproduce_app, "reader": reader_app}.items():
    app.add_typer(group, name=name)


def _version(asked: bool) -> None:
    if asked:
        print(f"epsim {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


for function in (
    replay_command, plan_command, run_command, compare_command, report_command, sweep_command, tune_command,
    calibrate_command,
):  # fmt: skip
    command(app, function.__name__.removesuffix("_command"))(function)
