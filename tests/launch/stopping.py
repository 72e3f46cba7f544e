"""Every long command with a small input, and a stop of it by a signal at a given time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.launch.processes import EPSIM, environment

MOST_SECONDS = 5.0
GRID = """policies = ["contiguous", "eplb+lplb"]
ranks = [8, 16]
redundant = [0, 16]
[[trace]]
path = "sample"
[[trace]]
name = "drawn"
draw = "sample"
steps = 20
step_tokens = [256, 1024]
"""
STACKS = ["--ranks", "16", "--redundant", "32", "--policy", "eplb", "--policy", "eplb+lplb"]
RUN = ["sample", "--model", "tiny", "--policy", "contiguous", "--policy", "eplb+lplb", "--redundant", "8"]
COMMANDS: Mapping[str, list[str]] = {
    "replay": ["replay", "sample", *STACKS, "--policy", "searched+lplb", "--out", "out"],
    "run": ["run", *RUN, "--out", "out"],
    "torchrun": ["run", *RUN, "--launcher", "torchrun", "--ranks", "2", "--out", "out"],
    "ray": ["run", *RUN, "--launcher", "ray", "--cpus", "2", "--out", "out"],
    "tune": ["tune", "sample", "--model", "epsim-small", "--hardware", "h200", "--gpus", "8", "--out", "out"],
    "sweep": ["sweep", "grid.toml", "--workers", "2", "--out", "out"],
    "calibrate": ["calibrate", "--device", "cpu", "--out", "out"],
    "import": ["traces", "import", "counts.json", "--top-k", "2", "-o", "new.parquet"],
    "synthesize": ["traces", "synthesize", "sample", "--steps", "20000", "-o", "new.parquet"],
    "plan": ["plan", "sample", "--ranks", "16", "--redundant", "32", "--placement", "searched", "-o", "new.json"],
    "report": ["report", "given", "--out", "out"],
    "reproduce": ["reproduce", "deepep"],
}
"""Commands of which a stop is tried. The files that they read are made by `make_inputs`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """command: a key of `COMMANDS`. after: seconds."""

    command: str
    by: signal.Signals
    after: float


def make_inputs(folder: Path) -> None:
    (folder / "grid.toml").write_text(GRID)
    step = ", ".join(["[5, 1, 2, 0], [3, 1, 3, 1]"] * 32)
    (folder / "counts.json").write_text('{"logical_count": [' + ", ".join([f"[{step}]"] * 3000) + "]}")
    given = [*EPSIM, "replay", "sample", *STACKS, "--out", "given"]
    subprocess.run(given, cwd=folder, env=environment(), check=True, capture_output=True)


def stop_and_look(stop: Stop, folder: Path) -> str | None:
    """Runs the command in a new folder beside the inputs. Returns what is wrong after the stop, empty if nothing is;
    None if the command was faster."""
    work, temporary = folder / "work", folder / "tmp"
    for path in (work, temporary):
        subprocess.run(["rm", "-rf", path], check=True)
        path.mkdir()
    for name in ("grid.toml", "counts.json", "given"):
        (work / name).symlink_to(folder / name)
    with (folder / "err").open("w+") as err:
        process = subprocess.Popen(
            [*EPSIM, *COMMANDS[stop.command]],
            cwd=work,
            env=environment(TMPDIR=str(temporary), EPSIM_STOPPED=str(work)),
            stdout=subprocess.DEVNULL,
            stderr=err,
            # A command ignores the signals that were ignored where it is started, such as Ctrl-C in the background.
            preexec_fn=lambda: signal.signal(stop.by, signal.SIG_DFL),
        )
        try:
            process.wait(stop.after)
            return None
        except subprocess.TimeoutExpired:
            pass
        begun = time.monotonic()
        handled = handles(process.pid)
        process.send_signal(stop.by)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{stop}: still runs after 30 s"
        seconds = time.monotonic() - begun
        err.seek(0)
        said = err.read()
    wrong = []
    # Until the command begins, a signal has Python's own effect.
    codes = (128 + stop.by, -stop.by) if handled else (128 + stop.by, -stop.by, 1)
    if code not in codes:
        wrong.append(f"exit code {code}")
    if seconds > MOST_SECONDS:
        wrong.append(f"took {seconds:.1f} s")
    if left := [path for root in (work, temporary) for path in unfinished(root)]:
        wrong.append(f"left {left}")
    if running := marked(work):
        wrong.append(f"still running: {running}")
    most = 100 if stop.command == "calibrate" else 1  # it prints what it has measured
    if handled and ("Traceback" in said or len(said.splitlines()) > most):
        wrong.append(f"said {said[-600:]!r}")
    return f"{stop}: {'; '.join(wrong)}" if wrong else ""


def handles(pid: int) -> bool:
    """Whether the process has installed its signal handlers."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def unfinished(root: Path) -> list[str]:
    """Temporary files in a folder: those that epsim names *.part, and all in TMPDIR."""
    found = [path for path in root.rglob("*") if root.name == "tmp" or path.name.endswith(".part")]
    return [str(path.relative_to(root)) for path in found if "ray" not in path.parts[len(root.parts)]]


def marked(work: Path) -> list[str]:
    """Command lines of running processes that the command has started, a moment later."""
    deadline = time.monotonic() + 3
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(os.getpid()):
                try:
                    if f"EPSIM_STOPPED={work}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
