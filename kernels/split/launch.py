"""Kernel launches through the CUDA driver. They take less host time than CuPy's.

They also support CUDA's programmatic dependent launch: a kernel may begin before the previous one has ended. Such a
kernel calls `griddepcontrol.wait` before it reads what the previous kernel wrote. All kernels before the previous one
have ended by then.
"""

import ctypes
import dataclasses
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


DEFAULT_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may use without setting its maximum."""
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
EARLY = ctypes.pointer(_Attribute(STREAM_SERIALIZATION, 0, (1,)))
TOGETHER = ctypes.pointer(_Attribute(COOPERATIVE, 0, (1,)))


@functools.cache
def _launch_kernel() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


def with_headers(path: Path, without: Container[str] = ()) -> str:
    """The text of a CUDA file with the project's headers inserted, except those in `without`. CuPy caches binaries by
    this text."""

    def text(include: re.Match[str]) -> str:
        header = path.parent / include[1]
        return "" if header.name in without else header.read_text()

    return re.sub(r'#include "([\w./]+\.cuh)"', text, path.read_text())


@functools.cache
def _module(source: str, options: tuple[str, ...]) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=options)


def compiled(
    device: int, source: str, definitions: dict[str, int], name: str, shared: int = 0, exact: bool = False
) -> int:
    """Compiles a kernel and returns the driver's handle, which the caller keeps. CuPy caches the binary on disk.

    definitions: macros for the compiler. shared: bytes of dynamic shared memory per block. exact: no fused
    multiply-adds, so that sums and products are rounded as on the CPU.
    """
    import cupy

    exactly = ("--fmad=false",) if exact else ()
    options = ("--std=c++17", *exactly, *(f"-D{macro}={value}" for macro, value in definitions.items()))
    with cupy.cuda.Device(device):
        kernel = _module(source, options).get_function(name)
        if shared > DEFAULT_SHARED:
            kernel.max_dynamic_shared_size_bytes = shared
        function: int = kernel.kernel.ptr
        return function


def macros(sizes: Any, *properties: str) -> dict[str, int]:
    """Macros for `compiled`: the fields of a dataclass and some of its properties, by their names in capitals."""
    names = (*(field.name for field in dataclasses.fields(sizes)), *properties)
    return {name.upper(): int(getattr(sizes, name)) for name in names}


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
    """Launches a kernel whose only parameter is a structure. function, stream: handles of the driver.

    early: the kernel may begin before the previous one has ended. together: a cooperative launch, for blocks that wait
    for each other. Not both. Raises RuntimeError if the driver refuses the launch.
    """
    config = _Config(
        (*grid, 1, 1)[:3], (threads, 1, 1), shared, stream, TOGETHER if together else EARLY, early or together
    )
    parameters = (ctypes.c_void_p * 1)(argument.ctypes.data)
    error = _launch_kernel()(ctypes.byref(config), ctypes.c_void_p(function), parameters, None)
    if error:
        raise RuntimeError(f"CUDA error {error} at a launch of {grid} blocks of {threads} threads")
