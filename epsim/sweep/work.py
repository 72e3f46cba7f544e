"""The work of a worker: it makes a trace or replays a cell. A failure is a line with the reason."""

import os
import sys
import traceback
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from epsim.files import CannotWriteError, message_line
from epsim.replaying import replay
from epsim.results import ResultsData
from epsim.sweep.cells import Cell
from epsim.sweep.sources import Making, Opening
from epsim.traces.store import StoredTrace

Job: TypeAlias = Making | Cell


@dataclass(frozen=True, slots=True)
class Done:
    """The job succeeded. results: of a cell; None for a trace that was made."""

    results: ResultsData | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed and would fail again. line: the reason. ends_sweep: whether the sweep cannot go on, because a file
    cannot be written."""

    line: str
    ends_sweep: bool = False


@dataclass(frozen=True, slots=True)
class Died:
    """The worker died during the job. Another worker may succeed. line: the reason."""

    line: str


Outcome: TypeAlias = Done | Failed | Died


def perform(job: Job) -> Done | Failed:
    """Performs a job. Failures are returned as `Failed`. Only exceptions that end the process are raised."""
    try:
        if isinstance(job, Making):
            job.make()
            return Done(None)
        return Done(replay_cell(job))
    except (ValueError, OSError) as error:
        return Failed(message_line(str(error)), isinstance(error, CannotWriteError))
    except MemoryError as error:
        return Failed(message_line(f"does not fit in this machine's memory ({error}): give fewer workers or ranks"))
    except Exception as error:
        if os.environ.get("EPSIM_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        return Failed(message_line(f"unexpected {type(error).__name__}: {error} (EPSIM_DEBUG=1 shows where)"))


def replay_cell(cell: Cell) -> ResultsData:
    """The results that `epsim replay` writes with the cell's options. Raises the errors of `replay`."""
    history = None if cell.history is None else _opened(cell.history)
    return replay(
        _opened(cell.trace), cell.options, history, trace_name=cell.trace_name, history_name=cell.history_name
    )


@lru_cache(maxsize=8)
def _opened(opening: Opening) -> StoredTrace:
    """Opens a trace; cells of the same trace share it."""
    return opening.open()
