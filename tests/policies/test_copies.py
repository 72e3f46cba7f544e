"""What a placement fixes is made once, however many threads ask for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from epsim.kernels.split import cuda, prepare
from epsim.placement.base import Placement
from epsim.policies.copies import Copies, even_fractions

THREADS = 8
made: list[object] = []


def slowly(copies: Copies) -> torch.Tensor:
    time.sleep(0.05)
    made.append(copies)
    return copies.once(even_fractions)


def test_threads_share_what_is_made_once() -> None:
    made.clear()
    copies, start = Copies(Placement(torch.tensor([[0, 1, 0, 2]]), 3, 2)), threading.Barrier(THREADS)

    def ask(_: int) -> torch.Tensor:
        start.wait()
        return copies.once(slowly)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, range(THREADS)))
    assert made == [copies]
    assert all(one is found[0] for one in found)
    assert found[0].tolist() == [[0.5, 1, 0.5, 1]]


def test_threads_share_tables_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    structure, start, pack = prepare(torch.tensor([[0, 1, 0, 2]]), 2), threading.Barrier(THREADS), cuda.pack
    packed: list[Any] = []

    def slow_pack(structure: Any) -> Any:
        time.sleep(0.05)
        packed.append(structure)
        return pack(structure)

    monkeypatch.setattr(cuda, "pack", slow_pack)

    def ask(_: int) -> Any:
        start.wait()
        return cuda._on_device(structure, torch.device("cpu"))

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(ask, range(THREADS)))
    assert packed == [structure]
    assert all(one is found[0] for one in found)
