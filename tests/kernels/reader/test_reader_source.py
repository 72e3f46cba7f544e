"""reader.cu, compiled for the host, keeps the same channels as the plain PyTorch code and gives its outputs."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.kernels.reader import cuda
from epsim.kernels.reader.build import build_layer
from epsim.kernels.reader.layer import GATES, Gate, ReaderLayer, as_words, from_words, in_parts
from epsim.kernels.reader.read import Experts, read_output
from epsim.kernels.reader.screen import Screen

BLOCKS = 3


def layer_of(
    experts: int, hidden: int, inter: int, top_k: int, budget: float, gate: Gate = "silu", **options: Any
) -> ReaderLayer:
    source = torch.Generator().manual_seed(hidden + inter)
    gate_up = (torch.randn(experts, 2 * inter, hidden, generator=source) / hidden**0.5).bfloat16()
    down = (torch.randn(experts, hidden, inter, generator=source) / inter**0.5).bfloat16()
    return ReaderLayer.of(build_layer(gate_up, down), gate_up, down, top_k, budget, gate, **options)


def inputs(layer: ReaderLayer, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.sketch.hidden, generator=source).bfloat16()
    ids = torch.rand(tokens, layer.sketch.num_experts, generator=source).topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, generator=source) + 0.1
    return x, ids, weights


def run_on_host(
    on_host: Callable[..., Callable[..., None]],
    layer: ReaderLayer,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: int = BLOCKS,
    backwards: int = False,
    launches: int = 0,
    words: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """launches before this one; words: what they left."""
    x, ids, weights = inputs
    sizes = layer.sizes(ids.shape[1])
    assert cuda.uncovered(sizes) is None
    run = on_host(cuda.source(cuda.INSTRUCTIONS), "halves.h", "reader", sizes.definitions)
    tensors = {"ids": ids, "weights": weights, "gate_up": layer.gate_up, "down": layer.down, "kept_of": layer.kept_of}
    ended = torch.tensor([launches * blocks])
    tensors |= {"ended": ended, **(words or cuda.workspace(sizes, len(x), blocks, torch.device("cpu")))}
    kept = torch.full((len(x), sizes.words), -1, dtype=torch.int32)
    argument, held = cuda.argument_of(layer.sketch, x, tensors, kept)
    held["output"].fill_(torch.nan)
    run(argument, blocks, cuda.THREADS, sizes.shared, backwards)
    assert int(ended) == (launches + 1) * blocks
    return held


def kept_as_plain(
    on_host: Callable[..., Callable[..., None]],
    layer: ReaderLayer,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    **options: Any,
) -> dict[str, torch.Tensor]:
    """`run_on_host`, and a check that the channels are those of the plain PyTorch code."""
    held = run_on_host(on_host, layer, given, **options)
    kept = torch.empty_like(held["kept"])
    layer.read(*given, kept=kept)
    assert torch.equal(held["kept"], kept)
    return held


def in_float64(
    layer: ReaderLayer, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kept: torch.Tensor
) -> torch.Tensor:
    x, ids, weights = given
    experts = Experts(layer.gate_up.double(), layer.down.transpose(1, 2).double(), GATES[layer.gate])
    gate, up = Screen(layer.sketch, torch.float64).estimates(x, ids, layer.coordinates)
    taken = from_words(kept, ids.shape[1], layer.sketch.intermediate)
    estimates, sketch = (experts.activation(gate) * up, layer.sketch) if layer.restore else (None, None)
    return read_output(x.double(), ids, weights, experts, taken, estimates, sketch)


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inter", "top_k", "gate", "options", "backwards"),
    [
        (1, 6, 256, 96, 4, "silu", {}, False),
        (1, 6, 256, 96, 4, "silu", {}, True),
        (2, 5, 384, 70, 3, "gelu", {"coordinates": 128, "restore": False}, True),
        (5, 4, 128, 33, 2, "silu", {"coordinates": 48}, False),
    ],
)
def test_equals_the_plain_form(
    on_host: Callable[..., Callable[..., None]],
    tokens: int,
    experts: int,
    hidden: int,
    inter: int,
    top_k: int,
    gate: Gate,
    options: dict[str, Any],
    backwards: bool,
) -> None:
    layer = layer_of(experts, hidden, inter, top_k, 0.7, gate, **options)
    given = inputs(layer, tokens, top_k)
    if top_k > 1:
        given[1][-1, 0] = -1
    held = run_on_host(on_host, layer, given, backwards=backwards)
    kept = torch.empty_like(held["kept"])
    plain = layer.read(*given, kept=kept)
    assert int(from_words(kept, top_k, inter).sum()) == int(layer.kept_of[(given[1] >= 0).sum(1)].sum()) > 0
    assert torch.equal(held["kept"], kept)
    assert far(held["output"], in_float64(layer, given, kept)) < 3e-3
    assert far(plain, in_float64(layer, given, kept)) < 1e-2


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 8), (2, 17)])
def test_many_blocks_of_a_token(on_host: Callable[..., Callable[..., None]], tokens: int, blocks: int) -> None:
    layer = layer_of(6, 256, 96, 4, 0.5)
    given = inputs(layer, tokens, 4)
    given[1][-1, 1] = -1
    held = kept_as_plain(on_host, layer, given, blocks=blocks, backwards=3)
    assert far(held["output"], in_float64(layer, given, held["kept"])) < 3e-3


def test_words_of_launches_before_are_no_ones(on_host: Callable[..., Callable[..., None]]) -> None:
    """Blocks run in several orders, after launches with other and with more tokens."""
    layer = layer_of(6, 256, 35, 3, 0.6)
    words = cuda.workspace(layer.sizes(3), 4, BLOCKS, torch.device("cpu"))
    for launches, tokens in enumerate((4, 2, 1, 4, 3)):
        given = inputs(layer, tokens, 3)
        held = kept_as_plain(on_host, layer, given, backwards=launches + 2, launches=launches, words=words)
        assert far(held["output"], in_float64(layer, given, held["kept"])) < 3e-3


def test_fewer_warps_gather_longer_rows(
    on_host: Callable[..., Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(6, 256, 96, 4, 0.7)
    given = inputs(layer, 1, 4)
    one = run_on_host(on_host, layer, given)
    monkeypatch.setattr(cuda.Sizes, "gathering", 3)
    other = run_on_host(on_host, layer, given)
    assert torch.equal(one["kept"], other["kept"])
    assert far(one["output"], other["output"]) < 3e-3


@pytest.mark.parametrize(("budget", "inter"), [(0.4, 64), (1.0, 64), (0.4, 300)])
def test_all_equal_scores_go_to_the_lower_channels(
    on_host: Callable[..., Callable[..., None]], budget: float, inter: int
) -> None:
    """Few that are compared, and more than that."""
    layer = layer_of(4, 128, inter, 4, budget)
    x, ids, weights = inputs(layer, 1, 4)
    held = run_on_host(on_host, layer, (torch.zeros_like(x), ids, weights))
    kept = from_words(held["kept"], 4, inter).flatten()
    number = int(layer.kept_of[4])
    assert kept[:number].all()
    assert not kept[number:].any()
    assert (held["output"] == 0).all()


def test_coordinates_of_few_sizes(on_host: Callable[..., Callable[..., None]]) -> None:
    """Of few values of x in a block come few sizes of Rx, of which 80 have some of a size and not others."""
    layer = layer_of(4, 256, 64, 2, 0.5)
    x, ids, weights = inputs(layer, 9, 2)
    number = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 128])[:, None]
    x = torch.where(torch.arange(256) % 128 < number, x.sign() * (1 + torch.arange(256) % 3), 0.0).bfloat16()
    held = kept_as_plain(on_host, layer, (x, ids, weights))
    assert far(held["output"], in_float64(layer, (x, ids, weights), held["kept"])) < 3e-3


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e12, 1e30])
def test_scores_of_any_size(on_host: Callable[..., Callable[..., None]], size: float) -> None:
    layer = layer_of(4, 128, 96, 3, 0.5)
    x, ids, weights = inputs(layer, 2, 3)
    weights[1] *= size
    held = kept_as_plain(on_host, layer, (x, ids, weights))
    assert far(held["output"], in_float64(layer, (x, ids, weights), held["kept"])) < 3e-3


@pytest.mark.parametrize("size", [1e-34, 1e35])
def test_tokens_of_any_size(on_host: Callable[..., Callable[..., None]], size: float) -> None:
    """Estimates beyond float32 count as infinite, below it as 0; others of the same token are what they are."""
    layer = layer_of(4, 256, 79, 3, 0.5, "gelu")
    x, ids, weights = inputs(layer, 3, 3)
    x[1] *= size
    kept_as_plain(on_host, layer, (x, ids, weights))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_scores_of_minus_zero_and_of_no_number(on_host: Callable[..., Callable[..., None]], wrong: float) -> None:
    """Gates of zero or far below it give -0, which is no large score; a token of NaN, or with one infinite value,
    leaves the others alone."""
    source = torch.Generator().manual_seed(5)
    gate_up = (torch.randn(3, 128, 128, generator=source) / 128**0.5).bfloat16()
    down = torch.randn(3, 128, 64, generator=source).bfloat16()
    x = torch.randn(3, 128, generator=source).bfloat16()
    gate_up[:, :20] = 0
    gate_up[:, 20:40] = -2 * x[0]
    gate_up[:, 64:104] = x[0] * torch.tensor([1.0, -1.0] * 20).bfloat16()[:, None]
    layer = ReaderLayer.of(build_layer(gate_up, down), gate_up, down, 2, 0.5, "gelu")
    x[1, slice(None) if wrong != wrong else 7] = wrong
    ids, weights = torch.tensor([[2, 0], [1, 2], [0, 1]]), torch.tensor([[0.5, 0.5], [0.9, 0.1], [-0.4, 0.6]])
    held = run_on_host(on_host, layer, (x, ids, weights))
    kept = torch.empty_like(held["kept"])
    plain = layer.read(x, ids, weights, kept)
    taken = from_words(kept, 2, 64)
    assert taken.sum((1, 2)).tolist() == [int(layer.kept_of[2])] * 3
    assert 0 < int(layer.kept_of[2]) < 2 * 24
    assert not taken[0, :, :40].any()
    assert torch.equal(held["kept"], kept)
    for output in (plain, held["output"]):
        assert output[1].isnan().all()
    sound = [0, 2]
    assert far(held["output"][sound], in_float64(layer, (x, ids, weights), kept)[sound]) < 3e-3


def test_a_token_without_experts_and_a_batch_of_them(on_host: Callable[..., Callable[..., None]]) -> None:
    layer = layer_of(4, 128, 64, 2, 0.5)
    x, ids, weights = inputs(layer, 4, 2)
    ids[1:] = -1
    held = run_on_host(on_host, layer, (x, ids, weights))
    assert (held["output"][1:] == 0).all()
    assert (held["kept"][1:] == 0).all()
    alone = run_on_host(on_host, layer, (x[:1], ids[:1], weights[:1]))
    assert torch.equal(alone["kept"][0], held["kept"][0])
    assert far(held["output"][:1], alone["output"]) < 4e-3


def test_words_come_back() -> None:
    taken = torch.rand(3, 4, 37, generator=torch.Generator().manual_seed(0)) < 0.4
    assert torch.equal(from_words(as_words(taken), 4, 37), taken)


def test_what_does_not_fit() -> None:
    layer = layer_of(4, 128, 64, 2, 0.5)
    x, ids, weights = inputs(layer, 2, 2)
    for wrong, words in (
        ((x.float(), ids, weights), "bfloat16"),
        ((x[:, :64], ids, weights), "not"),
        ((x, ids.int(), weights), "int64"),
        ((x, ids[:, :1], weights), "not"),
        ((x, ids, weights.double()), "float32"),
        ((x[:, ::1].T.contiguous().T, ids, weights), "multiples of 16"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.read(*wrong)
    with pytest.raises(ValueError, match=r"kept is \[2, 3\] torch.int32, not contiguous \[2, 4\] int32"):
        layer.read(x, ids, weights, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="is too small"):
        layer_of(4, 128, 64, 2, 0.01)
    assert "multiple of 16" in (cuda.uncovered(cuda.Sizes(128, 64, 2, 40, 32, False)) or "")
    assert np.dtype(cuda.ARGUMENTS).itemsize == 8 * (len(cuda.POINTERS) + 2)


def test_many_tokens_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(4, 128, 64, 2, 0.5)
    given = inputs(layer, 8, 2)
    whole, parts = torch.zeros(8, 4, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32)
    wanted = layer.read(*given, kept=whole)
    monkeypatch.setattr("epsim.kernels.reader.layer.MOST_TOKENS", 3)
    sizes = []

    def read(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(x))
        return layer.read(x, *rest)

    assert far(in_parts(read, *given, parts), wanted) < 1e-2
    assert torch.equal(parts, whole)
    assert sizes == [3, 3, 2]


def test_no_token() -> None:
    layer = layer_of(4, 128, 64, 2, 0.5)
    x, ids, weights = inputs(layer, 1, 2)
    kept = torch.zeros(0, 4, dtype=torch.int32)
    assert layer.read(x[:0], ids[:0], weights[:0], kept).shape == (0, 128)


MODELS = [(2048, 768, 8), (2816, 704, 8), (2048, 512, 8), (512, 256, 8)]
"""Hidden, intermediate, top-k: Qwen3-30B-A3B, Gemma-4-26B-A4B, Qwen3.5-35B-A3B, the small model."""


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (cuda.Sizes(3072, 2048, 8, 128, 32, False), None),
        (cuda.Sizes(2048, 256, 40, 80, 32, False), "a token has 40 experts, not 1 to 32"),
        (cuda.Sizes(2048, 2049, 8, 80, 32, False), "more than 16384 channels"),
        (cuda.Sizes(3200, 64, 8, 80, 32, False), "hidden 3200"),
        (cuda.Sizes(2048, 64, 8, 80, 16, False), "a map of rank 16"),
        *((cuda.Sizes(*shape, 80, rank, False), None) for shape in MODELS for rank in (0, 32)),
    ],
)
def test_shapes_that_are_not_covered(sizes: cuda.Sizes, says: str | None) -> None:
    found = cuda.uncovered(sizes)
    assert found is None if says is None else says in (found or "")


def test_shared_memory_is_what_the_source_takes(tmp_path: Path) -> None:
    """By g++, for shapes of all kinds: never more than is asked for, and less than a kibibyte less."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    draw = random.Random(0)
    drawn = [
        (128 * draw.randint(1, 24), draw.choice([1, 33, 250, 500, 1999]), draw.randint(1, 32), 16 * draw.randint(1, 8))
        for _ in range(100)
    ]
    every = [cuda.Sizes(*one, draw.choice([0, 32]), False) for one in [*((*m, 80) for m in MODELS), *drawn]]
    covered = [sizes for sizes in every if cuda.uncovered(sizes) is None]
    assert len(covered) > 40
    text = (Path(cuda.__file__).parent / "reader.cu").read_text()
    layout = text[text.index("constexpr int WARPS") : text.index("static_assert(sizeof(Shared)")]
    parts = [
        "#include <cstdint>\n#include <cstdio>\nusing u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t;"
        "using u64 = uint64_t; struct alignas(16) uint4 { u32 x[4]; }; struct float2 { float x, y; };"
    ]
    for number, sizes in enumerate(covered):
        parts += [f"#undef {name}\n#define {name} {value}" for name, value in sizes.definitions.items()]
        parts.append(f"namespace shape{number} {{\n{layout}\nconstexpr int size = sizeof(Shared); }}")
    printed = "".join(f'printf("%d\\n", shape{number}::size);' for number in range(len(covered)))
    code, program = tmp_path / "layout.cpp", tmp_path / "layout"
    code.write_text("\n".join([*parts, f"int main() {{ {printed} }}"]))
    subprocess.run(["g++", "-std=c++17", "-w", code, "-o", program], check=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    for sizes, size in zip(covered, map(int, found), strict=True):
        assert sizes.shared - 1024 <= size <= sizes.shared <= cuda.MOST_SHARED, sizes
