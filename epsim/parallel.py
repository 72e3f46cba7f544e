"""Runs work on the blocks of a trace in as many threads as there are cores, with results in order."""

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
    """The number of cores this process may use. EPSIM_THREADS lowers it when several processes share the cores."""
    available = len(os.sched_getaffinity(0))
    return min(available, int(os.environ.get("EPSIM_THREADS", available)))


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results of `work` on each item, in order, with at most one more item in flight than there are threads.

    Each thread runs PyTorch on one core. On small tensors two cores, which wait for each other after every operation,
    are slower than one, and much slower if another process holds the second.
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
