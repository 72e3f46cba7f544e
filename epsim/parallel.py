"""Work on the blocks of a trace by as many threads as there are cores, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

MAX_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """That this process may use; EPSIM_THREADS says fewer, where processes share them."""
    there = len(os.sched_getaffinity(0))
    return min(there, int(os.environ.get("EPSIM_THREADS", there)))


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results of `work` on each item, in order, with at most one more item in flight than there are threads.

    Each thread runs PyTorch on one core: on small tensors two cores that wait for each other at the end of every
    operation are slower than one, and by far where another process holds the second.
    """
    most = min(cores(), MAX_THREADS)
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(most, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
