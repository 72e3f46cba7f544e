"""Commands end as they should: at once after a signal, and without a thread or a file left."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epsim import stops
from epsim.files import folder_for_results, temporary_beside
from tests.conftest import Epsim, TraceMaker
from tests.launch.processes import EPSIM, environment, run
from tests.launch.stopping import COMMANDS, Stop, make_inputs, stop_and_look

THREADS = """
import sys, threading
from epsim.cli.main import main
sys.argv = ["epsim", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    sys.exit(f"threads left: {left}" if left else ended.code)
"""
NO_PAUSE = "import epsim.launch.torchrun as launcher\nlauncher.INTERVAL = 0.0\n"
SHORT = ["--model", "tiny", "--policy", "contiguous", "--steps", "1", "--device", "cpu"]
LAUNCHERS = {
    "inline": [],
    "torchrun": ["--launcher", "torchrun", "--ranks", "2"],
    "ray": ["--launcher", "ray", "--cpus", "2", "--restarts", "0"],
}
FAULT = "nan:rank=0,step=0"
IN_A_CALLBACK = """
import os, signal, sys, time, weakref
from epsim import stops

class Thing:
    pass

def stopped(reference):
    os.kill(os.getpid(), signal.{name})
    sum(range(1000))

with stops.handled():
    thing = Thing()
    reference = weakref.ref(thing, stopped)
    del thing
    try:
        time.sleep(20)
    except BaseException:
        pass
"""


def times(name: str, default: int) -> int:
    """How often a long test repeats its trial: the number in an environment variable."""
    return int(os.environ.get(name, default))


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "TRACE", "--ranks", "4", "--policy", "searched(seconds=0.1)+lplb", "--out", "OUT"],
        ["plan", "TRACE", "--ranks", "4", "--placement", "eplb", "-o", "OUT"],
        ["traces", "show", "TRACE"],
        ["sweep", "GRID", "--out", "OUT", "--workers", "1"],
        ["run", "TRACE", *SHORT, "--out", "OUT"],
        ["run", "TRACE", *SHORT, "--ranks", "3", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.slow
def test_no_thread_outlives_main(make_trace: TraceMaker, tmp_path: Path, words: list[str]) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('policies = ["contiguous"]\nranks = [4]\n[[trace]]\npath = "trace.parquet"\n')
    names = {"TRACE": make_trace("tokens", steps=12).path, "GRID": grid, "OUT": tmp_path / "out"}
    ended = run([sys.executable, "-c", THREADS, *(names.get(word, word) for word in words)])
    assert "threads left" not in ended.err
    assert ended.code == (2 if "3" in words else 0), ended.err


@pytest.mark.long
@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_short_runs_end_as_they_should(make_trace: TraceMaker, tmp_path: Path, launcher: str, fault: bool) -> None:
    """EPSIM_RUNS: the number of runs in a row. The torchrun launcher polls its store without a pause, which made a
    thread that outlives the run likely to abort the process."""
    trace = make_trace("tokens", steps=12)
    command: list[str | Path] = [sys.executable, "-c", NO_PAUSE + THREADS, "run", trace.path, *SHORT]
    command += LAUNCHERS[launcher]
    given = environment(EPSIM_TRIAL_FAULT=FAULT) if fault else environment()
    for _ in range(times("EPSIM_RUNS", 2)):
        ended = run([*command, "--out", tmp_path / "out"], given)
        expected = 0 if not fault else 2 if launcher == "inline" else 1
        assert ended.code == expected, ended.err


@pytest.mark.long
def test_stops_at_random_times(tmp_path: Path) -> None:
    """EPSIM_STOPS: the number of stops; EPSIM_STOP_SEED: of the times."""
    make_inputs(tmp_path)
    draw = random.Random(times("EPSIM_STOP_SEED", 0))
    names = list(COMMANDS)
    wrong = []
    for number in range(times("EPSIM_STOPS", 12)):
        stop = Stop(names[number % len(names)], draw.choice(stops.SIGNALS), 12 * draw.random() ** 2)
        wrong.append(stop_and_look(stop, tmp_path))
    assert not [words for words in wrong if words]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stop_in_a_callback_is_not_lost(name: str) -> None:
    """An exception there would be dropped."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_CALLBACK.format(name=name)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in stops.SIGNALS],
    )
    assert process.wait(20) == 128 + signal.Signals[name]
    assert time.monotonic() - begun < 10


def test_what_a_stop_cleans_up(tmp_path: Path) -> None:
    """A child process, a child that ignores SIGTERM, and an unfinished file."""
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom epsim import stops\n"
        "from epsim.files import temporary_beside\n"
        "with stops.handled():\n"
        "    temporary_beside(Path(sys.argv[1], 'results.json'))\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    subprocess.Popen(['sh', '-c', 'trap \"\" TERM; echo ready; exec sleep 60'])\n"
        "    time.sleep(60)\n"
    )
    given = environment(EPSIM_STOPPED=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, env=given)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert time.monotonic() - begun < stops.GRACE
    assert list(tmp_path.iterdir()) == []
    assert process.stdout.read() == b""  # both children, which hold it open, have ended


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stops.handled():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_dead_parent_ends_its_child(tmp_path: Path) -> None:
    child = "import os, sys, time; from epsim import stops; stops.end_with_parent(os.getppid()); print(1, flush=True);"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child + ' time.sleep(60)'!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    process.kill()
    begun = time.monotonic()
    assert process.stdout.read() == b""  # the child has ended
    assert time.monotonic() - begun < 10
    process.wait()


def test_a_folder_is_for_one_command(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path) -> None:
    """Replay, run, sweep, report and compare refuse a folder that another process writes into. No lock file remains."""
    trace, out = make_trace("tokens", steps=4).path, tmp_path / "out"
    grid = tmp_path / "grid.toml"
    grid.write_text(f'policies = ["contiguous"]\nranks = [4]\n[[trace]]\npath = "{trace.name}"\n')
    replay = ["replay", trace, "--ranks", "4", "--policy", "eplb", "--out"]
    assert epsim(*replay, out)[0] == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == ["pictures", "report.html", "report.md", "results.json"]
    (tmp_path / "new").mkdir()
    for folder, words in (
        (out, replay),
        (out, ["run", trace, *SHORT, "--out"]),
        (tmp_path / "new", ["sweep", grid, "--out"]),
        (out, ["report", out, "--out"]),
        (out, ["compare", out, out, "--out"]),
    ):
        with folder_for_results(folder):
            code, _, err = epsim(*words, folder)
        assert (code, err.count("\n")) == (2, 1)
        assert f"--out {folder}: another command is writing into it" in err
    assert epsim(*replay, out)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == names


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(handle: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with folder_for_results(tmp_path / "out"):
        temporary_beside(tmp_path / "out" / "x").unlink()


def test_a_closed_pipe_has_its_own_exit_code(epsim: Epsim, make_trace: TraceMaker, tmp_path: Path) -> None:
    """Not the code by which `compare --fail-if` answers."""
    out = tmp_path / "out"
    stacks = ["--policy", "eplb", "--policy", "contiguous"]
    assert epsim("replay", make_trace("counts").path, "--ranks", "4", *stacks, "--out", out)[0] == 0
    command = [*EPSIM, "compare", str(out), "--fail-if", "eplb.peak.mean > 0"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
