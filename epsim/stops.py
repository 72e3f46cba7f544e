"""Ends this process when a signal asks it to stop, without half-written files and without child processes left.

A signal handler that raises an exception is not enough. Python drops the exception inside a callback such as `__del__`,
code that catches every exception swallows it, and the main thread may be busy in compiled code. So a thread ends the
process, and the signal handler only makes the main thread wait for that.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE = 3.0
"""Seconds that child processes get to end by themselves after SIGTERM."""
PR_SET_PDEATHSIG = 1

Answer = Callable[[signal.Signals], None]

_cleanups: list[Callable[[], None]] = []
_lines: list[Callable[[signal.Signals], str]] = []
_answers: list[Answer] = []
_installed = threading.Event()
_ending = threading.Event()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Ends this process with exit code 128 + N if signal N of `SIGNALS` arrives inside the block. Ignored signals stay
    ignored, as under nohup. For the main thread. At the end of the block, `clean_up` runs what was given inside it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    first = len(_cleanups)

    def wait(number: int, frame: Any) -> None:
        os.write(writing, bytes([number]))  # in case other code has replaced the file descriptor below
        if not _answers:
            threading.Event().wait()

    thread = threading.Thread(target=_listen, args=(reading,), name="epsim-stops")
    caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    with _blocked():
        thread.start()
        previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, wait) for number in caught}
        _installed.set()
    try:
        yield
    finally:
        clean_up(first)
        with _blocked():
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.write(writing, b"\0")
            thread.join()  # does not return if a signal is ending this process
            _installed.clear()
            os.close(reading)
            os.close(writing)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Signals that arrive inside the block are delivered at its end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _listen(reading: int) -> None:
    while number := os.read(reading, 1)[0]:
        if number in SIGNALS:
            (_answers[-1] if _answers else end)(signal.Signals(number))


def end(by: signal.Signals) -> None:
    """Ends this process and its child processes because of a signal."""
    _ending.set()
    try:
        line = "epsim: interrupted" if by == signal.SIGINT else ""
        with contextlib.suppress(Exception):
            _end_children()
        with contextlib.suppress(Exception):
            if _lines:  # after the children's end, because they may have reported where they were
                line = f"epsim: {_lines[-1](by)}"
        clean_up()
        # Not by print: the main thread may hold the lock of sys.stderr. A progress bar has hidden the cursor.
        os.write(2, ("\x1b[?25h" * os.isatty(2) + (line and line + "\n")).encode())
    finally:
        os._exit(128 + by)


def wait_if_ending() -> None:
    """Does not return if a signal is ending this process. Call it after an error that the signal may have caused."""
    if _installed.is_set() and _ending.wait(0.2):
        threading.Event().wait()


@contextlib.contextmanager
def line_at_stop(line: Callable[[signal.Signals], str]) -> Iterator[None]:
    """Inside the block, a process that a signal ends prints this line."""
    _lines.append(line)
    try:
        yield
    finally:
        _lines.remove(line)


@contextlib.contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Inside the block, `answer` is called with the signal, in another thread, and this process is not ended."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.remove(answer)


def at_end(clean: Callable[[], None]) -> None:
    """Calls `clean` when a signal ends this process, or when the command ends."""
    _cleanups.append(clean)


def clean_up(first: int = 0) -> None:
    """Calls the functions given to `at_end`, the latest first, except for the first ones."""
    for clean in _cleanups[first:][::-1]:
        with contextlib.suppress(Exception):
            clean()
    del _cleanups[first:]


def end_with_parent(parent: int, by: signal.Signals = signal.SIGTERM) -> None:
    """Sends this process the signal when its parent process ends. parent: its process id."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(by))
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), by)


def _end_children() -> None:
    """Ends all descendants of this process: by SIGTERM, and after `GRACE` by SIGKILL."""
    asked: set[int] = set()
    begun = time.monotonic()
    while running := _descendants(asked):
        seconds = time.monotonic() - begun
        for pid, ignores_term in running.items():
            if seconds > GRACE or pid not in asked:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if seconds > GRACE or ignores_term else signal.SIGTERM)
        if seconds > GRACE + 1:  # it waits inside the kernel
            return
        asked |= set(running)
        time.sleep(0.02)


def _descendants(also: set[int]) -> dict[int, bool]:
    """The running descendants of this process, and those of `also` that still run. Each with whether it ignores
    SIGTERM."""
    fields: dict[int, list[str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields[int(entry.name)] = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
    family = {os.getpid()} | also
    while more := {pid for pid, stat in fields.items() if int(stat[1]) in family} - family:
        family |= more
    ignores = 1 << (signal.SIGTERM - 1)
    return {
        pid: bool(int(fields[pid][30]) & ignores)
        for pid in family - {os.getpid()}
        if pid in fields and fields[pid][0] not in "ZX"
    }
