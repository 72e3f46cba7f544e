"""The parts that commands share: options made from dataclasses, progress on the terminal, and printing of results."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epsim.options import Options, Parameter, Progress, parameters

if TYPE_CHECKING:
    from epsim.report.results import Results

OutOption = Annotated[
    str | None,
    typer.Option("--out", metavar="DIR", help="Write results.json, report.md and report.html to this folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a function to the app as a command. A parameter whose type is a class of options becomes its options."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(function, eval_str=True).parameters.values()
        kinds = {entry.name: entry.annotation for entry in given}
        groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Options)}
        options = {kind: parameters(kind) for kind in groups.values()}

        def called(**values: Any) -> None:
            made = {}
            for parameter, kind in groups.items():
                chosen = {entry.name: values.pop(entry.name) for entry in options[kind]}
                made[parameter] = kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in chosen.items()})
            function(**made, **values)

        shown = [_parameter(entry) for declared in options.values() for entry in declared]
        shown += [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in given if entry.name not in groups]
        called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        called.__annotations__ = {entry.name: entry.annotation for entry in shown}
        called.__doc__ = function.__doc__
        app.command(name)(called)
        return function

    return decorate


def _parameter(entry: Parameter) -> inspect.Parameter:
    """An option as typer declares it."""
    about = entry.about
    more: dict[str, Any] = {"help": about.help, "metavar": about.metavar}
    if entry.type in (int, float):
        more |= {"min": about.least, "max": about.most}
    names = [name for name in (about.short, entry.flag) if name]
    kind = list[entry.type] if entry.many else entry.type  # type: ignore[name-defined]
    default = inspect.Parameter.empty if entry.required else list(entry.default) if entry.many else entry.default
    declared = typer.Argument(**more) if about.argument else typer.Option(*names, **more)
    optional = kind if default is not None else kind | None
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[optional, declared]
    )


def command_line() -> str:
    """The running command, quoted for a shell."""
    return shlex.join(["epsim", *sys.argv[1:]])


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)


def working(words: str) -> AbstractContextManager[object]:
    """Shows a spinner on stderr, if that is a terminal, during work of unknown length."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status(words) if console.is_terminal else nullcontext()


def give(results: Results, out: str | None, json_output: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Writes the report to `out`, if given, and prints the results: as JSON, or with `show`."""
    if out is not None:
        results.report(out)
    if json_output:
        import json

        print(json.dumps(results.data, indent=1))
    else:
        show(results.data)
