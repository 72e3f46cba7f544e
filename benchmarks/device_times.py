"""Times on one CUDA device, from CUDA graphs between device events, and the device's rate of reading memory."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from common import command

HELD = 600_000
"""Cycles of a kernel that keeps the device busy while the host queues replays, so that host time is not measured."""
SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) reads(const uint4 *from, long long number, unsigned *to) {
    unsigned sum = 0;
    const long long step = (long long)gridDim.x * 512;
    long long at = blockIdx.x * 512ll + threadIdx.x;
    for (; at + 7 * step < number; at += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __ldcs(from + at + i * step);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    for (; at < number; at += step) sum += from[at].x;
    if (sum == 0x9e3779b9u) *to = sum;
}
"""
BYTES = 4 << 30


def report_head() -> dict[str, Any]:
    """The first entries of a report for one GPU: device, version of PyTorch, command."""
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": command()}


def graph(run: Callable[[], object], repeats: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeats` calls in a row."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(repeats):
            run()
    return captured


def buffers_of(*inputs: torch.Tensor) -> tuple[list[torch.Tensor], Callable[[int], object]]:
    """A buffer [1, ...] for each tensor of inputs [N, ...], and a function that copies the inputs of a number there."""
    buffers = [tensor[:1].clone() for tensor in inputs]

    def feed(i: int) -> None:
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor[i : i + 1])

    return buffers, feed


def times_by_input(
    captured: torch.cuda.CUDAGraph, feed: Callable[[int], object], inputs: int, replays: int
) -> np.ndarray:
    """Microseconds [inputs] per replay of the graph, for each input i that feed(i) sets: the median over replays."""
    marks = []
    for i in range(inputs):
        feed(i)
        captured.replay()
        torch.cuda._sleep(HELD)
        marks += [_between(captured.replay) for _ in range(replays)]
    return np.median(_microseconds(marks).reshape(inputs, replays), axis=1)


def timed(calls: list[Callable[[], Any]], replays: int, captured: bool = True) -> float:
    """Microseconds per call, all calls in a row: the median over replays of one graph, or over plain calls."""

    def run() -> None:
        for call in calls:
            call()

    run()
    torch.cuda.synchronize()
    if captured:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        run = recorded.replay
        run()
    marks = []
    for _ in range(replays):
        torch.cuda._sleep(HELD // 2)
        marks.append(_between(run))
    return float(np.median(_microseconds(marks))) / len(calls)


def timed_in_turn(
    form: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    layers: Sequence[Sequence[Any]],
    replays: int,
    captured: bool = True,
) -> float:
    """Microseconds of form(*input, *layer), called for each input, with the layers in turn (`timed`)."""
    calls = [partial(form, *given, *layer) for given, layer in zip(inputs, itertools.cycle(layers))]
    return timed(calls, replays, captured)


def _between(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    return begin, end


def _microseconds(marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> np.ndarray:
    torch.cuda.synchronize()
    return np.array([begin.elapsed_time(end) for begin, end in marks]) * 1e3


def read_bandwidth() -> float:
    """Bytes per second of a kernel that reads 4 GiB and writes nothing, with the best of several grid sizes."""
    import cupy

    kernel = cupy.RawModule(code=SOURCE, options=("--std=c++17",)).get_function("reads")
    data = torch.empty(BYTES, dtype=torch.uint8, device="cuda").random_()
    to = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = torch.cuda.get_device_properties(data.device).multi_processor_count

    def read(each: int) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks * each,), (512,), (data.data_ptr(), BYTES // 16, to.data_ptr()))

    return max(BYTES / (timed([lambda each=each: read(each)] * 3, 11) * 1e-6) for each in (1, 2, 4, 8, 16))
