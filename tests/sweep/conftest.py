"""Small grids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from epsim.sweep.cells import Cell
from epsim.sweep.work import Died, Job, Outcome, perform


class Here:
    """A pool that works in this process; `dies` says which jobs, by their number of being given out, lose a worker."""

    num_workers = 2

    def __init__(self, dies: Callable[[Job, int], bool] = lambda job, time: False) -> None:
        self.dies, self.given, self.closed = dies, 0, False
        self.at: deque[tuple[int, Job]] = deque()
        self.order: list[str] = []

    def give(self, worker: int, job: Job) -> None:
        assert worker not in [other for other, _ in self.at]
        self.at.append((worker, job))

    def wait(self) -> list[tuple[int, Outcome]]:
        worker, job = self.at.popleft()
        self.order.append(job.key if isinstance(job, Cell) else job.target.name)
        self.given += 1
        return [(worker, Died("its worker is gone") if self.dies(job, self.given) else perform(job))]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def write_grid(tmp_path: Path) -> Callable[..., Path]:
    """write_grid(text, name=) -> its file, in tmp_path."""

    def write(text: str, name: str = "grid.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
