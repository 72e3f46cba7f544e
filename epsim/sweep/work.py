"""What a worker does: makes a trace, or replays a cell, and says in one line why it cannot."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from epsim.files import message_line
from epsim.replaying import replay
from epsim.results import Results
from epsim.sweep.cells import Cell
from epsim.sweep.sources import Making, Opening
from epsim.traces.store import StoredTrace

Job: TypeAlias = Making | Cell


@dataclass(frozen=True, slots=True)
class Done:
    """results: of a cell; None for a trace made."""

    results: Results | None


@dataclass(frozen=True, slots=True)
class Failed:
    """line: why, for people. The same job would fail again."""

    line: str


@dataclass(frozen=True, slots=True)
class Died:
    """The worker is gone in mid-job; another may manage."""

    line: str


Outcome: TypeAlias = Done | Failed | Died


def perform(job: Job) -> Done | Failed:
    """Never raises but for what ends a process: a job that fails is an outcome like others."""
    try:
        if isinstance(job, Making):
            job.make()
            return Done(None)
        return Done(replay_cell(job))
    except (ValueError, OSError) as error:
        return Failed(message_line(str(error)))
    except MemoryError as error:
        return Failed(message_line(f"more than fits this machine's memory ({error}): give fewer workers or ranks"))
    except Exception as error:
        if os.environ.get("EPSIM_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        return Failed(message_line(f"unexpected {type(error).__name__}: {error} (EPSIM_DEBUG=1 shows where)"))


def replay_cell(cell: Cell) -> Results:
    """What `epsim replay` with the cell's options writes. Raises as `replay`."""
    history = None if cell.history is None else _opened(cell.history)
    return replay(
        _opened(cell.trace), cell.options, history, trace_name=cell.trace_name, history_name=cell.history_name
    )


@lru_cache(maxsize=8)
def _opened(opening: Opening) -> StoredTrace:
    """Cells of one trace read its description once."""
    return opening.open()
