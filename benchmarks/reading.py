"""The rate at which a device can read: what the floors of memory-bound kernels are reckoned with."""

from __future__ import annotations

import torch
from oea_latency import timed

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


def read_bandwidth() -> float:
    """Bytes a second of a kernel that reads 4 GiB and writes nothing: the best of several sizes of its grid."""
    import cupy

    kernel = cupy.RawModule(code=SOURCE, options=("--std=c++17",)).get_function("reads")
    data = torch.empty(BYTES, dtype=torch.uint8, device="cuda").random_()
    to = torch.zeros(1, dtype=torch.int32, device="cuda")
    blocks = torch.cuda.get_device_properties(data.device).multi_processor_count

    def read(each: int) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((blocks * each,), (512,), (data.data_ptr(), BYTES // 16, to.data_ptr()))

    return max(BYTES / (timed([lambda each=each: read(each)] * 3) * 1e-6) for each in (1, 2, 4, 8, 16))
