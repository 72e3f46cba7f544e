"""Starts the commands as a user does, in processes of their own, and looks at what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
EPSIM = [sys.executable, "-m", "epsim.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 240.0


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What epsim itself said on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("epsim: ")]


def environment(**more: str) -> dict[str, str]:
    """That of a user's shell; tests of one core each."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EPSIM_", "RAY_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | more


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Ended:
    done = subprocess.run(
        [str(part) for part in command], env=env or environment(), capture_output=True, text=True, timeout=LIMIT
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def start(command: Sequence[str | Path], env: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([str(part) for part in command], env=env, stdout=pipe, stderr=pipe, text=True)


def last_written(folder: Path) -> float:
    """When the last step was finished."""
    return max(path.stat().st_mtime for path in folder.glob("rank-*.arrows"))


def await_place(folder: Path, rank: int, place: str) -> None:
    """Until a rank has left word that it is there: phase, step and layer."""
    deadline = time.monotonic() + LIMIT / 2
    file = folder / f"rank-{rank:05d}.place"
    while not file.exists() or not file.read_text().startswith(place):
        assert time.monotonic() < deadline, f"rank {rank} never came to {place}"
        time.sleep(0.1)


def survivors(mark: Path) -> list[str]:
    """Command lines of processes that name the path, a moment after the launcher has ended."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                try:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(mark) in words and "pytest" not in words:
                    found.append(words)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
