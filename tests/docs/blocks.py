"""Code blocks of Markdown files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(path: Path, kind: str) -> list[str]:
    """Contents of the blocks that begin with ```kind."""
    text = path.read_text(encoding="utf-8")
    return [found[1] for found in re.finditer(rf"^```{re.escape(kind)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def commands(path: Path) -> list[str]:
    """Lines after `$ `, in order."""
    return [line[2:] for block in blocks(path, "console") for line in block.splitlines() if line.startswith("$ ")]


def examples(path: Path) -> list[str]:
    """Lines of ```sh blocks that call epsim, comments gone, continued lines joined."""
    joined = [block.replace("\\\n", " ") for block in blocks(path, "sh")]
    lines = [line.split(" #")[0].strip() for block in joined for line in block.splitlines()]
    return [line for line in lines if line.startswith("epsim ")]


def processor_seconds(command: Sequence[str]) -> float:
    """That a command takes, of processors rather than of the clock: other tests run beside."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
