"""Workers forked from one process that has imported all they need: the same command, without a launcher."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.launch.processes import LIMIT, Ended
from tests.runtime.worlds import PRELOAD, WARM


def run_forked(
    num_ranks: int, arguments: Sequence[str | Path], changed: Mapping[int, Mapping[str, Any]]
) -> list[Ended]:
    """`python -m epsim.launch.worker` as torchrun would start it, on `num_ranks` processes -> how each ended, by rank.

    changed: of a rank, what differs: `environment` (a dict), `arguments` (more of them).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "epsim.launch.rank", "epsim.launch.worker", WARM])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = []
    with tempfile.TemporaryDirectory() as name:
        processes: list[Any] = []
        files = [Path(name) / f"{rank}.{kind}" for rank in range(num_ranks) for kind in ("out", "err")]
        for rank in range(num_ranks):
            given = changed.get(rank, {})
            environment: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": num_ranks}
            environment |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment |= given.get("environment", {})
            words = [str(part) for part in (*arguments, *given.get("arguments", ()))]
            pair = [str(path) for path in files[2 * rank : 2 * rank + 2]]
            made: Any = context.Process(target=_worker, args=(words, environment, pair), daemon=True)
            made.start()
            processes.append(made)
        deadline = time.monotonic() + LIMIT
        try:
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0))
            assert all(process.exitcode is not None for process in processes), "a worker does not end"
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, process in enumerate(processes):
            out, err = (path.read_text() for path in files[2 * rank : 2 * rank + 2])
            ended.append(Ended(process.exitcode, out, err))
    return ended


def _worker(arguments: list[str], environment: Mapping[str, Any], files: Sequence[str]) -> None:
    import torch

    from epsim.launch.worker import main

    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith(("EPSIM_", "TORCHELASTIC_"))]:
        del os.environ[name]
    os.environ |= {name: str(value) for name, value in environment.items()}
    for stream, path in zip((sys.stdout, sys.stderr), files, strict=True):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    main(arguments)
