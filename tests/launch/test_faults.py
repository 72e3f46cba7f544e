"""What goes wrong in a job of real processes: one line that names rank and phase, nobody left, finished steps kept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.runtime.telemetry import read_telemetry
from epsim.traces.store import StoredTrace
from tests.launch.forked import run_forked
from tests.launch.processes import EPSIM, TORCHRUN, Ended, await_place, environment, last_written, run, start, survivors

pytestmark = pytest.mark.slow

MOST_SECONDS = 30.0
PLANNED, FAULTY = 6, 8


@pytest.fixture
def job(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> list[str | Path]:
    """Steps 6 to 11 are run, by two or three ranks."""
    trace = make_trace("tokens", steps=12, layers=2, tokens=48, shared_cost=1.0)
    options = ["--model", "tiny", "--policy", "contiguous", "--policy", "eplb+lplb", "--redundant", "4"]
    return [trace.path, *options, "--timeout", "6", "--out", tmp_path / "out"]


def fault(job: list[str | Path], trial: str, ranks: int) -> tuple[Ended, float]:
    """What the launcher said, and the seconds from the last finished step to its end."""
    command = [*EPSIM, "run", *job, "--launcher", "torchrun", "--ranks", str(ranks)]
    ended = run(command, environment(EPSIM_TRIAL_FAULT=trial))
    return ended, time.time() - last_written(Path(job[-1]) / "telemetry")


def check_kept(out: Path, steps: list[int], num_ranks: int = 2) -> None:
    table = read_telemetry(out / "telemetry")
    assert sorted(set(table["step"].to_pylist())) == steps
    assert table.num_rows == len(steps) * 2 * 2 * num_ranks  # stacks x layers x ranks
    assert not survivors(out)


@pytest.mark.long
def test_a_launcher_names_the_dead_where_no_rank_can(job: list[str | Path]) -> None:
    """Rank 0 waits with the interpreter held, as in deep_ep's dispatch, when rank 1 dies."""
    out = Path(job[-1])
    job[-3] = "600"
    trial = environment(EPSIM_TRIAL_FAULT="hold:rank=0,step=8,layer=1,phase=dispatch")
    process = start([*EPSIM, "run", *job, "--launcher", "torchrun", "--ranks", "2"], trial)
    await_place(out / "telemetry", 0, "dispatch 8 1")
    await_place(out / "telemetry", 1, "dispatch 8 1")
    os.kill(worker(out, 1), signal.SIGKILL)
    begun = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begun < MOST_SECONDS
    assert err == "epsim: rank 1 stopped answering in phase dispatch, step 8, layer 1 (the launcher reports)\n"
    assert process.returncode == 1
    check_kept(out, [6, 7])


def worker(out: Path, rank: int) -> int:
    """The process of a rank of the job that writes there."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                own = b"epsim.launch.worker" in words and str(out).encode() in words
                if own and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.long
def test_a_stopped_rank_is_named_and_ended(job: list[str | Path]) -> None:
    ended, seconds = fault(job, "stop:rank=0,step=8,layer=0,phase=experts", 2)
    assert ended.code == 1
    assert len(ended.lines) == 1, ended.err
    assert ended.lines[0].startswith("epsim: rank 0 stopped answering in phase experts, step 8, layer 0")
    assert seconds < MOST_SECONDS
    check_kept(Path(job[-1]), [6, 7])


@pytest.mark.parametrize(
    ("ranks", "trial", "line"),
    [
        (3, "kill:rank=2,step=8,layer=1,phase=dispatch", "rank 2 stopped answering in phase dispatch, step 8, layer 1"),
        (2, "sleep:rank=1,step=8,layer=1,phase=combine", "rank 1 hangs in phase combine, step 8, layer 1 for 6 s"),
        (2, "nan:rank=1,step=8", "rank 1, step 8, layer 0, phase route: router scores are not finite"),
        (3, "short:rank=2,step=8", "rank 2 finished after step 7, but rank"),
    ],
)
def test_workers_end_by_themselves(job: list[str | Path], ranks: int, trial: str, line: str) -> None:
    """Without a launcher that would end those that do not."""
    every = {"environment": {"EPSIM_TRIAL_FAULT": trial}}
    ended = run_forked(ranks, job, dict.fromkeys(range(ranks), every))
    if trial.startswith("kill"):
        assert ended.pop(2).code == -signal.SIGKILL
    said = [one for one in ended if check_ended(one)]
    assert len(said) == 1
    assert said[0].lines[0].startswith(f"epsim: {line}")
    assert time.time() - last_written(Path(job[-1]) / "telemetry") < MOST_SECONDS
    check_kept(Path(job[-1]), [6, 7], ranks)


def check_ended(ended: Ended, code: int = 1) -> bool:
    """Whether this worker is the one that says why."""
    assert ended.code == code, ended.err
    assert len(ended.lines) <= 1, ended.err
    return bool(ended.lines)


def test_sigterm_to_the_launcher(job: list[str | Path]) -> None:
    trial = "sleep:rank=1,step=8,layer=0,phase=balance"
    job[-3] = "600"
    out = Path(job[-1])
    process = start(
        [*EPSIM, "run", *job, "--launcher", "torchrun", "--ranks", "2"], environment(EPSIM_TRIAL_FAULT=trial)
    )
    await_place(out / "telemetry", 1, "balance 8 0")
    await_place(out / "telemetry", 0, "dispatch 8 0")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begun < MOST_SECONDS
    assert len(err.splitlines()) == 1, err
    assert err.startswith("epsim: stopped by SIGTERM; rank ")
    assert ", step 8, layer 0" in err
    check_kept(out, [6, 7])


def test_full_disk_under_telemetry(make_trace: Callable[..., StoredTrace], tmp_path: Path) -> None:
    trace = make_trace("tokens", steps=120, layers=2, tokens=48)
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", disk]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        options = ["--model", "tiny", "--policy", "contiguous", "--policy", "eplb", "--redundant", "2"]
        command: list[str | Path] = [*EPSIM, "run", trace.path, *options, "--launcher", "torchrun", "--ranks", "2"]
        ended = run([*command, "--out", disk / "out"])
        assert ended.code == 2
        assert len(ended.lines) == 1, ended.err
        assert "phase telemetry, step" in ended.lines[0]
        assert "no space left on device" in ended.lines[0]
        table = read_telemetry(disk / "out" / "telemetry")
        steps = sorted(set(table["step"].to_pylist()))
        assert len(steps) > 5
        assert steps == list(range(60, 60 + len(steps)))
        assert table.num_rows == len(steps) * 2 * 2 * 2
        assert not survivors(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.long
def test_plain_torchrun_says_the_line_too(job: list[str | Path]) -> None:
    trial = "kill:rank=1,step=8,layer=0,phase=balance"
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "epsim.launch.worker", *job]
    ended = run(command, environment(EPSIM_TRIAL_FAULT=trial))
    assert ended.code == 1
    assert len(ended.lines) == 1, ended.err
    assert ended.lines[0].startswith("epsim: rank 1 stopped answering in phase balance, step 8, layer 0 (rank ")
    check_kept(Path(job[-1]), [6, 7])


def test_ranks_given_different_numbers_of_steps(job: list[str | Path]) -> None:
    given = {rank: {"arguments": ["--steps", steps]} for rank, steps in enumerate("43")}
    said = [one for one in run_forked(2, job, given) if check_ended(one, 2)]
    assert len(said) == 1
    words = "phase setup: rank 1 has 3 steps to run and rank 0 4 steps to run: give every rank the same"
    assert words in said[0].lines[0]


def test_a_worker_that_cannot_start_is_told(job: list[str | Path], tmp_path: Path) -> None:
    """The launcher's own checks pass, and then its workers end without a word."""
    code = f"import sys; sys.executable = {shutil.which('false')!r}; from epsim.cli.main import main; main()"
    ended = run([sys.executable, "-c", code, "run", *job, "--launcher", "torchrun", "--ranks", "2"])
    assert ended.code == 1
    assert len(ended.lines) == 1, ended.err
    assert "ended with exit code 1 in phase setup" in ended.lines[0]


BROKEN = """
from epsim.policies import splits

def broken(*given):
    raise {error}("the policy is broken")

splits.Even.fractions = broken
"""


@pytest.mark.parametrize("error", ["RuntimeError", "ValueError"])
@pytest.mark.parametrize("launcher", ["torchrun", "plain torchrun"])
def test_debugging_shows_the_traceback_of_a_policy(
    job: list[str | Path], tmp_path: Path, launcher: str, error: str
) -> None:
    """Two gloo ranks. Without EPSIM_DEBUG it is one line, as for every fault."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(error=error))
    command: list[str | Path] = [*EPSIM, "run", *job, "--launcher", "torchrun", "--ranks", "2"]
    if launcher == "plain torchrun":
        command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "epsim.launch.worker", *job]
    ended = run(command, environment(PYTHONPATH=str(tmp_path)))
    assert ended.code != 0
    assert len(ended.lines) == 1
    assert "the policy is broken" in ended.lines[0]
    assert "in broken" not in ended.err
    ended = run(command, environment(PYTHONPATH=str(tmp_path), EPSIM_DEBUG="1"))
    assert ended.code != 0
    assert "epsim: rank " in ended.err
    assert "Traceback (most recent call last)" in ended.err
    assert ", in broken" in ended.err
    assert "epsim/policies/" in ended.err
    assert f"{error}: the policy is broken" in ended.err
