"""batch.cu, compiled for the host, keeps the same channels as the plain PyTorch code and gives its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from epsim.kernels.reader import batch_cuda
from epsim.kernels.reader.batch import BatchReader, of_slots
from epsim.kernels.reader.layer import GATES, Gate, from_words
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.screen import Batches, Screen
from epsim.kernels.reader.select import top_mask
from tests.kernels.reader.test_reader_source import far, inputs, layer_of

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OnHost = Callable[..., Callable[..., None]]


def reader_of(
    experts: int, hidden: int, inter: int, top_k: int, budget: float, gate: Gate = "silu", **options: Any
) -> BatchReader:
    return BatchReader.of(layer_of(experts, hidden, inter, top_k, 1.0, gate, **options), budget)


def run_on_host(on_host: OnHost, reader: BatchReader, given: Given, order: int = 0, blocks: int = 2) -> dict[str, Any]:
    x, ids, weights = given
    sizes, layer = reader.sizes, reader.layer
    experts = layer.sketch.num_experts
    assert batch_cuda.uncovered(sizes, len(x), experts, ids.shape[1]) is None
    tensors = {"ids": ids, "weights": weights, "gate_up": layer.gate_up, "down": layer.down, "kept_of": reader.kept_of}
    kept = torch.zeros(experts, sizes.padded // 32, dtype=torch.int32)
    argument, held = batch_cuda.argument_of(sizes, layer.sketch, x, tensors, kept)
    for name, tensor in held.items():
        if name in SCRATCH:
            tensor.view(torch.uint8).fill_(0xFF)
    run = on_host(batch_cuda.source(batch_cuda.INSTRUCTIONS) + EVERY, "batch.h", "every", sizes.definitions)
    stages = int(argument["stages"][0])
    for name, grid, threads, shared in sizes.launches(len(x), experts, ids.shape[1], blocks):
        argument["stages"] = KERNELS.index(name) << 8 | stages
        run(argument, grid, threads, shared, order)
    return held


KERNELS = ("prepare", "screen", "screen_more", "choose", "enlist", "extend", "project", "finish")
EVERY = f"""
static void every(Arguments a) {{
    const int number = a.stages >> 8;
    a.stages &= 255;
    {" else ".join(f"if (number == {number}) {name}(a);" for number, name in enumerate(KERNELS))}
}}
"""
"""One function for all kernels, so that a shape is compiled once. The upper bits of `stages` select the kernel."""
SCRATCH = set(batch_cuda.POINTERS[batch_cuda.POINTERS.index("state") :]) - {"kept"}


def active_of(ids: torch.Tensor) -> torch.Tensor:
    """Experts with tokens, ascending."""
    return torch.bincount(ids[ids >= 0]).nonzero()[:, 0]


def totals(held: dict[str, Any], inter: int) -> torch.Tensor:
    """[active, I] float32: sums of scores by active expert, ascending."""
    active = int(held["state"].view(torch.int32)[2])
    found: torch.Tensor = held["scores"].view(torch.float32).view(-1, inter)[:active]
    return found


def in_float64(reader: BatchReader, given: Given, kept: torch.Tensor) -> torch.Tensor:
    """The output with these channels."""
    layer, (x, ids, weights) = reader.layer, given
    experts = Experts(layer.gate_up.double(), layer.down.transpose(1, 2).double(), GATES[layer.gate])
    batches = Batches(torch.zeros(len(x), dtype=torch.int64, device=x.device), 1)
    gate, up = Screen(layer.sketch, torch.float64).estimates(x, ids, layer.coordinates, batches)
    taken = of_slots(kept, ids, layer.sketch.intermediate)
    estimates, sketch = (experts.activation(gate) * up, layer.sketch) if layer.restore else (None, None)
    return read_output(x.double(), ids, weights, experts, taken, estimates, sketch)


def check(held: dict[str, Any], reader: BatchReader, given: Given) -> None:
    """Channels exactly those of the kernel's own scores; scores and outputs near the plain form's."""
    ids = given[1]
    inter, experts = reader.layer.sketch.intermediate, reader.layer.sketch.num_experts
    active = active_of(ids)
    scores = totals(held, inter)
    assert len(scores) == len(active)
    number = int(reader.kept_of[len(active)])
    wanted = torch.zeros(experts, inter, dtype=torch.bool)
    wanted[active] = top_mask(scores.flatten(), number).view_as(scores)
    kept = from_words(held["kept"], 1, inter)[:, 0]
    assert torch.equal(kept, wanted)
    other = torch.empty_like(held["kept"])
    plain = reader.read(*given, kept=other)
    assert float((from_words(other, 1, inter)[:, 0] != kept).float().mean()) < 0.02
    assert far(held["output"], in_float64(reader, given, held["kept"])) < 4e-3
    assert far(plain, in_float64(reader, given, other)) < 1e-2


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inter", "top_k", "gate", "options", "order"),
    [
        (1, 6, 256, 96, 4, "silu", {}, 1),
        (12, 2, 2176, 40, 1, "silu", {}, 0),
        (66, 4, 128, 168, 1, "gelu", {"coordinates": 128, "restore": False}, 7),
    ],
)
def test_equals_the_plain_form(
    on_host: OnHost,
    tokens: int,
    experts: int,
    hidden: int,
    inter: int,
    top_k: int,
    gate: Gate,
    options: dict[str, Any],
    order: int,
) -> None:
    reader = reader_of(experts, hidden, inter, top_k, 0.7, gate, **options)
    given = inputs(reader.layer, tokens, top_k)
    given[1][-1] = -1
    held = run_on_host(on_host, reader, given, order)
    check(held, reader, given)
    again = run_on_host(on_host, reader, given, 1 - order % 2, blocks=3)
    assert torch.equal(held["output"], again["output"])


@pytest.mark.parametrize("budget", [0.6, 1.0])
def test_equal_scores_go_to_the_lower_channels(on_host: OnHost, budget: float) -> None:
    reader = reader_of(6, 256, 96, 4, budget)
    x, ids, weights = inputs(reader.layer, 2, 4)
    held = run_on_host(on_host, reader, (torch.zeros_like(x), ids, weights))
    active = active_of(ids)
    kept = from_words(held["kept"], 1, 96)[:, 0][active].flatten()
    number = int(reader.kept_of[len(active)])
    assert kept[:number].all()
    assert not kept[number:].any()
    assert (held["output"] == 0).all()


def test_a_token_of_no_number_takes_its_experts_and_leaves_the_others_values(on_host: OnHost) -> None:
    reader = reader_of(6, 256, 96, 4, 0.7)
    x, ids, weights = inputs(reader.layer, 3, 4)
    x[1] = torch.nan
    ids[1, 1:] = -1
    held = run_on_host(on_host, reader, (x, ids, weights))
    kept = from_words(held["kept"], 1, 96)[:, 0]
    assert kept[ids[1, 0]].all()
    assert int(kept.sum()) == int(reader.kept_of[len(active_of(ids))])
    assert held["output"][1].isnan().all()
    sound = [0, 2]
    assert far(held["output"][sound], in_float64(reader, (x, ids, weights), held["kept"])[sound]) < 4e-3


def test_tokens_without_experts(on_host: OnHost) -> None:
    reader = reader_of(6, 256, 96, 4, 0.7)
    x, ids, weights = inputs(reader.layer, 3, 4)
    wild = torch.cat([x[:1], x[1:] * 100])
    ids[1:] = -1
    held, alone = (run_on_host(on_host, reader, one) for one in ((wild, ids, weights), (x[:1], ids[:1], weights[:1])))
    assert (held["output"][1:] == 0).all()
    assert torch.equal(held["kept"], alone["kept"])
    assert torch.equal(held["output"][:1], alone["output"])
    none = run_on_host(on_host, reader, (x, torch.full_like(ids, -1), weights))
    assert not none["kept"].any()
    assert (none["output"] == 0).all()


@hypothesis.given(
    tokens=st.integers(1, 12),
    holes=st.floats(0, 0.9),
    budget=st.sampled_from([0.5, 0.7, 0.95]),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=6, deadline=None)
def test_any_batch(on_host: OnHost, tokens: int, holes: float, budget: float, seed: int) -> None:
    """Idle experts, gaps and repeated tokens, whose channels' scores are equal sums."""
    reader = reader_of(6, 256, 96, 4, budget)
    x, ids, weights = inputs(reader.layer, tokens, 4)
    x[: tokens // 2] = x[0]
    ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < holes] = -1
    ids[0, 0] = 5 if not (ids == 5)[0].any() else ids[0, 0]
    check(run_on_host(on_host, reader, (x, ids, weights), seed), reader, (x, ids, weights))
