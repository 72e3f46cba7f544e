"""Kernel launches by the driver, which takes less of the host's time than CuPy's and may let a kernel begin before the
one before it has ended (CUDA's programmatic dependent launch).

A kernel that begins early says itself, by `griddepcontrol.wait`, where it needs what the one before it wrote; what came
before that one has ended.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy.typing as npt

STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
EARLY = ctypes.pointer(_Attribute(STREAM_SERIALIZATION, 0, (1,)))
TOGETHER = ctypes.pointer(_Attribute(COOPERATIVE, 0, (1,)))


@functools.cache
def _launch_kernel() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def with_headers(path: Path, without: Container[str] = ()) -> str:
    """A file with our own headers in place, but those named: CuPy looks up binaries by the text that it is given."""

    def text(found: re.Match[str]) -> str:
        header = path.parent / found[1]
        return "" if header.name in without else header.read_text()

    return re.sub(r'#include "([\w./]+\.cuh)"', text, path.read_text())


def compiled(device: int, source: str, definitions: dict[str, int], name: str, shared: int = 0) -> int:
    """The driver's handle of a kernel; NVRTC compiles it, CuPy keeps it on disk by the text. The caller keeps it.

    definitions: the macros that it is compiled for. shared: bytes of dynamic shared memory that a block may have.
    """
    import cupy

    options = ("--std=c++17", *(f"-D{macro}={value}" for macro, value in definitions.items()))
    with cupy.cuda.Device(device):
        found = cupy.RawModule(code=source, options=options).get_function(name)
        if shared:
            found.max_dynamic_shared_size_bytes = shared
        function: int = found.kernel.ptr
        return function


def launch(
    function: int,
    grid: tuple[int, ...],
    threads: int,
    shared: int,
    stream: int,
    argument: npt.NDArray[Any],
    early: bool,
    together: bool = False,
) -> None:
    """Of a kernel whose only parameter is a structure; function, stream: the driver's handles, in the current context.

    early: it may begin before the one before it has ended. together: its blocks wait for each other, and so all run at
    once; not both. Raises RuntimeError where the driver refuses it.
    """
    config = _Config(
        (*grid, 1, 1)[:3], (threads, 1, 1), shared, stream, TOGETHER if together else EARLY, early or together
    )
    parameters = (ctypes.c_void_p * 1)(argument.ctypes.data)
    error = _launch_kernel()(ctypes.byref(config), ctypes.c_void_p(function), parameters, None)
    if error:
        raise RuntimeError(f"CUDA error {error} at a launch of {grid} blocks of {threads} threads")
