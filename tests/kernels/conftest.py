"""CUDA kernels compiled for the host, one fiber per thread (tests/kernels/host)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.compiled import compiled

Run: TypeAlias = Callable[..., None]
"""Of run(argument, blocks, threads, bytes of shared memory, order=0)."""
HOST = Path(__file__).with_name("host")
MEMORY = "extern __shared__ __align__({}) u8 memory[];"


@pytest.fixture(scope="session")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """on_host(source without its header, the header's stand-in, kernel, definitions) -> Run; skips without g++."""
    built: dict[Any, Run] = {}

    def build(source: str, own: str, kernel: str, definitions: dict[str, int]) -> Run:
        key = (source, own, kernel, *definitions.items())
        if key not in built:
            built[key] = _build(tmp_path_factory, source, own, kernel, definitions)
        return built[key]

    return build


def _build(factory: pytest.TempPathFactory, source: str, own: str, kernel: str, definitions: dict[str, int]) -> Run:
    for alignment in (16, 128):
        source = source.replace(MEMORY.format(alignment), "u8 *memory = block_memory();")
    options = [f'-DSTAND_IN="{HOST / own}"', f"-DKERNEL={kernel}"]
    options += [f"-D{name}={value}" for name, value in definitions.items()]
    library = compiled(factory, source, HOST / "fibers.h", options)

    def run(argument: npt.NDArray[Any], blocks: int, threads: int, memory: int, order: int = 0) -> None:
        argument = np.ascontiguousarray(argument)
        failed = library.run(ctypes.c_void_p(argument.ctypes.data), blocks, threads, memory, order)
        assert not failed, "threads wait for each other for ever"

    return run
