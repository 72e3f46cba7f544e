"""The command that results name: without the places of recordings and results, which are a machine's own."""

from __future__ import annotations

import shlex
import sys

PLACES = ("--recordings", "--batches", "--cache", "--out")


def command(script: str) -> str:
    """script: its name in benchmarks/, with the arguments of this run."""
    places = {at + step for at, word in enumerate(sys.argv) if word in PLACES for step in (0, 1)}
    given = [word for at, word in enumerate(sys.argv) if at and at not in places]
    return shlex.join(["python", f"benchmarks/{script}", *given])
