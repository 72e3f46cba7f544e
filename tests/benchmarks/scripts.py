"""Benchmarks are programs, not a package: their modules are imported from their folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> Any:
    """The module of that name in benchmarks/, such as `gates.gate`."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)
