"""Dispatch and combine over torch's collectives, and which exchange is chosen."""

from __future__ import annotations

import pytest
import torch

from epsim.runtime.exchange.choose import choose_exchange
from epsim.runtime.exchange.deep_ep import obstacle
from epsim.runtime.weights import ModelWeights
from epsim.traces.model.config import ModelShape, build_model
from tests.runtime import programs
from tests.runtime.worlds import launch

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_tokens_go_once_to_each_rank_and_come_back_summed() -> None:
    ran = launch(3, programs.exchanged, 3)
    tokens = [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]
    takes = {token: (token % 9, (token + 1) % 9) for token in tokens}
    for rank, found in enumerate(ran):
        wanted = [token for token in tokens if rank in (takes[token][0] // 3, takes[token][1] // 3)]
        assert found["rows"] == wanted, "rows by source rank, then token; one a token"
        for token, slots, weights in zip(wanted, found["slots"], found["weights"]):
            here = [slot - 3 * rank if slot // 3 == rank else -1 for slot in takes[token]]
            assert slots == [*here, -1]
            assert weights == [token + 0.25 if here[0] >= 0 else 0, token + 0.5 if here[1] >= 0 else 0, 0]
        own = [] if rank == 1 else range(10 * rank, 10 * rank + 5)
        whole = torch.tensor([[2 * t + 0.75, 4 * t + 1.5] for t in own]).reshape(-1, 2)
        assert torch.equal(torch.tensor(found["back"]).reshape(-1, 2), whole.bfloat16().float())


def choose(name: str, hidden: int = 64) -> str:
    exchange = choose_exchange(
        name, group=None, device=CPU, dtype=torch.float32, hidden=hidden, slots_per_rank=4, columns=2, max_tokens=8
    )
    return f"{exchange.name}: {exchange.why}"


def test_the_choice_says_why() -> None:
    assert choose("auto") == "torch: no deep_ep: it needs GPUs"
    assert choose("torch") == "torch: asked for"
    with pytest.raises(ValueError, match="exchange deep_ep cannot be used here: it needs GPUs; use --exchange torch"):
        choose("deep_ep")
    with pytest.raises(ValueError, match="exchange 'nccl' is not one of auto, deep_ep, torch"):
        choose("nccl")


@pytest.mark.parametrize(
    ("size", "hidden", "slots", "columns", "dtype", "why"),
    [
        (16, 7168, 18, 9, torch.bfloat16, "16 ranks"),
        (2, 7168, 129, 9, torch.bfloat16, "129 slots per rank"),
        (2, 7168, 128, 33, torch.bfloat16, "33 experts per token"),
        (2, 8192, 128, 9, torch.bfloat16, "hidden size 8192"),
        (2, 7168, 128, 9, torch.float32, "float32"),
    ],
)
def test_what_deep_ep_cannot_serve(
    size: int, hidden: int, slots: int, columns: int, dtype: torch.dtype, why: str
) -> None:
    found = obstacle(GPU, dtype, size, hidden, slots, columns)
    assert found is not None
    assert why in found


def test_real_routers_and_weights_give_the_models_outputs() -> None:
    """Layers of a transformers model under a stack, with its own router."""
    torch.manual_seed(0)
    small = ModelShape(vocabulary=64, num_layers=2, hidden=32, num_heads=2, num_experts=8, top_k=2, intermediate=16)
    model = build_model(small)
    weights = ModelWeights(model)
    layers = []
    for layer in weights.layers:
        held = programs.Held(weights.shape, [weights.routed(layer, e) for e in range(8)], weights.shared(layer))
        given = []
        for rank in range(2):
            hidden = torch.randn(80 + rank, 32, generator=torch.Generator().manual_seed(rank))
            with torch.no_grad():
                given.append((hidden, model.model.layers[layer].mlp(hidden[None])[0]))
        layers.append((held, weights.router(layer, CPU, torch.float32), given))
    assert max(launch(2, programs.run_model, 2, layers)) < 1e-5
