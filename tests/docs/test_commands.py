"""Every documented command works as printed; those that need what is not here have options that exist."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, commands, examples, processor_seconds

COMMANDS = ROOT / "docs" / "commands.md"
PAGES = (COMMANDS, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

Run = Callable[[str], int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(line) -> exit code; epsim runs in this process, which has loaded it already."""
    from epsim.cli.main import main

    def call(line: str) -> int:
        if not line.startswith("epsim ") or ">" in shlex.split(line):
            return subprocess.run(line, shell=True, check=False).returncode
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code if isinstance(stop.value.code, int) else 1

    return call


@pytest.mark.slow
def test_commands_run_as_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = commands(COMMANDS)
    for line in lines:
        code = run(line)
        captured = capsys.readouterr()
        assert code == 0, f"{line}\n{captured.err}"
        assert captured.err == "", line
    written = {"out", "today", "difference", "pages", "sweep", "tuned"}
    assert all((tmp_path / folder / "report.html").exists() for folder in written)


def test_every_command_has_an_example() -> None:
    from typer.main import get_command

    from epsim.cli.app import app

    told = "\n".join([*commands(COMMANDS), *examples(COMMANDS)])
    names = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {name for name in names if f"epsim {name} " not in told} <= {"reader"}
    assert "epsim reader --help" in COMMANDS.read_text()


def parsed(arguments: list[str]) -> None:
    """Parses a command line without running it. Raises what a user would be told."""
    from typer.main import get_command

    from epsim.cli.app import app

    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    command.make_context("epsim", list(arguments))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_other_examples_have_options_that_exist(path: Path) -> None:
    for line in examples(path):
        parsed(shlex.split(line)[1:])


def test_a_wrong_example_would_be_found() -> None:
    with pytest.raises(Exception, match="--rank"):
        parsed(["replay", "sample", "--rank", "4", "--policy", "eplb"])


def test_help_answers_at_once() -> None:
    assert min(processor_seconds([sys.executable, "-m", "epsim.cli", "--help"]) for _ in range(4)) < 0.4


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    words = {"COMP_WORDS": "epsim com", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "epsim com"}
    words |= {"_EPSIM_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    program = str(Path(sys.executable).parent / "epsim")
    done = subprocess.run([program], env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert "compare" in done.stdout, done.stderr
