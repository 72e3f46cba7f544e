"""Small grids, and the command as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.cli import main

Epsim = Callable[..., tuple[int, str, str]]


@pytest.fixture
def epsim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Epsim:
    """epsim(*arguments) -> exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["epsim", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return run


@pytest.fixture
def write_grid(tmp_path: Path) -> Callable[..., Path]:
    """write_grid(text, name=) -> its file, in tmp_path."""

    def write(text: str, name: str = "grid.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
