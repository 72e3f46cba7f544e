"""A replay of the sample with splits on the GPU gives the same files as on the CPU, except for the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from epsim.kernels.split import cuda
from epsim.placement.base import Cluster
from epsim.policies.stack import parse_stack
from epsim.replaying import Device, ReplayOptions, replay
from epsim.report.write import write_report
from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda.available(), reason="needs a GPU and CuPy")]
STACKS = ("contiguous", "eplb", "eplb+lplb", "eplb+lplb-sampled+waterfill", "eplb+lplb(counts=gathered)+waterfill")
TEXTS = ("results.json", "report.md", "report.html")


def test_the_sample_gives_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    policies = tuple(("", parse_stack(text)) for text in STACKS)
    trace = open_trace([Path("sample")], ImportOptions())
    written = []
    devices: tuple[Device, ...] = ("cpu", "cuda")
    for device in devices:
        out = tmp_path / device
        out.mkdir()
        write_report(replay(trace, ReplayOptions(Cluster(16, 2, 32), policies, device=device)), out)
        written.append([(out / name).read_bytes() for name in TEXTS])
    assert len(written[0][0]) > 10_000
    assert written[0] == written[1]
