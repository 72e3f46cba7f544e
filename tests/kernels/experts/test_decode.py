"""The implementations that run on CPUs: plain PyTorch, and Triton in its interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from epsim.kernels.experts import decode


def drawn(tokens: int = 6) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 5, generator=source).topk(3, dim=1).indices
    ids[0, 1] = ids[1] = -1
    shapes = ((tokens, 16), (5, 24, 16), (5, 16, 12))
    hidden, gate_up, down = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return hidden, ids, torch.rand(tokens, 3, generator=source), gate_up, down


def test_is_each_tokens_weighted_sum() -> None:
    hidden, ids, weights, gate_up, down = drawn()
    wanted = torch.zeros_like(hidden)
    for token, column in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, column])
        gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
        wanted[token] += weights[token, column] * (down[expert] @ (F.silu(gate) * up))
    counts = torch.full((5,), -1)
    found = decode(hidden, ids, weights, gate_up, down, counts=counts)
    torch.testing.assert_close(found, wanted)
    assert not found[1].any()
    assert counts.tolist() == [int((ids == expert).sum()) for expert in range(5)]


def test_slots_point_to_rows() -> None:
    hidden, ids, weights, gate_up, down = drawn()
    rows = torch.tensor([2, 0, 4, 1, 3])
    found = decode(hidden, ids, weights, gate_up, down, rows)
    torch.testing.assert_close(found, decode(hidden, ids, weights, gate_up[rows], down[rows]))


def test_tells_what_does_not_fit() -> None:
    hidden, ids, weights, gate_up, down = drawn()
    with pytest.raises(ValueError, match="65 tokens"):
        decode(hidden[:1].expand(65, -1), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"down \[5, 16, 11\]"):
        decode(hidden, ids, weights, gate_up, down[..., 1:])
    with pytest.raises(ValueError, match=r"int64"):
        decode(hidden, ids.int(), weights, gate_up, down)
    with pytest.raises(ValueError, match="float32"):
        decode(hidden, ids, weights.double(), gate_up, down)
    with pytest.raises(ValueError, match=r"hidden is torch\.float32, gate_up torch\.float64"):
        decode(hidden.float(), ids, weights, gate_up, down)
    with pytest.raises(ValueError, match="1, 3, 3 axes"):
        decode(hidden[0], ids, weights, gate_up, down)
    rows = torch.arange(5)
    for wrong in (rows.int(), rows[None], torch.arange(10)[::2]):
        with pytest.raises(ValueError, match=r"rows are .* not \[.*\] int64, contiguous"):
            decode(hidden, ids, weights, gate_up, down, wrong)
    for wrong in (rows.int(), rows[:4], torch.arange(10)[::2]):
        with pytest.raises(ValueError, match=r"counts are .* not \[5\] int64, contiguous"):
            decode(hidden, ids, weights, gate_up, down, counts=wrong)


def test_ids_that_no_form_takes_are_told_on_a_cpu() -> None:
    hidden, ids, weights, gate_up, down = drawn()
    for wrong in (5, -2):
        changed = ids.clone()
        changed[3, 1] = wrong
        with pytest.raises(ValueError, match=f"id {wrong} is outside 0..4"):
            decode(hidden, changed, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"id 2 is outside 0..1"):
        decode(hidden, torch.full_like(ids[:, :1], 2), weights[:, :1], gate_up, down, torch.tensor([4, 3]))
    ids[2] = torch.tensor([1, 4, 1])
    with pytest.raises(ValueError, match="token 2 has expert 1 twice"):
        decode(hidden, ids, weights, gate_up, down)


def test_no_tokens_and_no_experts() -> None:
    hidden, ids, weights, gate_up, down = drawn()
    counts = torch.full((5,), -1)
    assert decode(hidden[:0], ids[:0], weights[:0], gate_up, down, counts=counts).shape == (0, 16)
    assert counts.tolist() == [0] * 5
    assert not decode(hidden, torch.full_like(ids, -1), weights, gate_up, down, counts=counts).any()
    assert counts.tolist() == [0] * 5


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_triton_interpreted() -> None:
    program = Path(__file__).with_name("interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 4
    for found in cases:
        assert found["error"] < 5e-4
        assert found["counted"]
        assert found["moved"]
        assert found["padding"]
