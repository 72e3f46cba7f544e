"""Routers, compared with the models that they implement and with values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from epsim.models.shapes import SHAPES, LayerShape, RouterRule, shape_of, shape_of_config
from epsim.runtime.reference import reference_output
from epsim.runtime.routers import SigmoidGroups, SoftmaxTopK, TokenHash, hash_table, make_router
from epsim.runtime.weights import ModelWeights, RandomWeights
from epsim.traces.model.config import ModelShape, build_model

CPU = torch.device("cpu")


def test_deepseek_v3_layer_is_the_models() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    block = DeepseekV3MoE(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    bias = torch.randn(16) * 0.1
    block.gate.e_score_correction_bias.copy_(bias)
    shape = LayerShape("v3", 32, 16, 16, 4, 16, "sigmoid-groups", True, 2.5, 4, 2)

    class Source:
        def routed(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return block.experts.gate_up_proj[expert], block.experts.down_proj[expert]

        def shared(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            shared = block.shared_experts
            return torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), shared.down_proj.weight

    hidden = torch.randn(50, 32)
    with torch.no_grad():
        wanted = block(hidden[None])[0]
        routing = SigmoidGroups(shape, block.gate.weight, bias)(hidden)
        found = reference_output(
            shape, Source(), 0, hidden, routing.ids, routing.weights, routing.shared_weight, torch.float32
        )
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert max(len(set(row)) for row in (routing.ids // 4).tolist()) == 2


def test_the_trained_models_layer_is_the_models() -> None:
    torch.manual_seed(0)
    model = build_model(
        ModelShape(vocabulary=64, num_layers=2, hidden=32, num_heads=2, num_experts=8, top_k=2, intermediate=16)
    )
    weights = ModelWeights(model)
    assert (weights.layers, weights.shape.shared_cost, weights.shape.shared_gate) == ((0, 1), 1.0, True)
    hidden = torch.randn(20, 32)
    for layer in weights.layers:
        with torch.no_grad():
            wanted = model.model.layers[layer].mlp(hidden[None])[0]
        routing = weights.router(layer, CPU, torch.float32)(hidden)
        found = reference_output(
            weights.shape, weights, layer, hidden, routing.ids, routing.weights, routing.shared_weight, torch.float32
        )
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no mixture-of-experts layer 7, only 0, 1"):
        weights.routed(7, 0)


def test_softmax_top_k_by_hand() -> None:
    shape = LayerShape("s", 2, 4, 3, 2)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    routing = SoftmaxTopK(shape, weight)(torch.tensor([[2.0, 1.0]]))
    assert routing.ids.tolist() == [[0, 1]]
    first = torch.e**2 / (torch.e**2 + torch.e)
    assert routing.weights[0].tolist() == pytest.approx([first, 1 - first])
    plain = SoftmaxTopK(LayerShape("s", 2, 4, 3, 2, renormalise=False), weight)(torch.tensor([[2.0, 1.0]]))
    assert plain.weights[0, 0].item() == pytest.approx(torch.e**2 / (torch.e**2 + torch.e + torch.e**-2))


def test_forced_ids_are_weighed_by_the_router() -> None:
    shape = LayerShape("s", 2, 4, 3, 2)
    router = SoftmaxTopK(shape, torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    hidden, ids = torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([[2, 0], [1, -1]])
    routing = router(hidden, None, ids)
    assert routing.ids is ids
    first = torch.e**-2 / (torch.e**2 + torch.e**-2)
    assert routing.weights.flatten().tolist() == pytest.approx([first, 1 - first, 1.0, 0.0])


def test_hash_follows_the_token_id_alone() -> None:
    shape = LayerShape("h", 8, 4, 16, 4, 4, "hash")
    router = make_router(shape, 2, 5, CPU, torch.float32, vocabulary=100)
    assert isinstance(router, TokenHash)
    ids = torch.tensor([7, 9, 7])
    hidden = torch.randn(3, 8)
    routing = router(hidden, ids)
    assert torch.equal(routing.ids[0], routing.ids[2])
    assert torch.equal(routing.ids, hash_table(100, shape, 5, 2)[ids])
    assert torch.allclose(routing.weights.sum(1), torch.ones(3))
    scores = torch.nn.functional.softplus(hidden @ router.weight.T).sqrt().gather(1, routing.ids)
    assert torch.allclose(routing.weights, scores / scores.sum(1, keepdim=True))
    with pytest.raises(ValueError, match=r"token id 100 is outside 0\.\.99"):
        router(hidden, torch.tensor([1, 100, 2]))
    with pytest.raises(ValueError, match="needs token_ids"):
        router(hidden)
    with pytest.raises(ValueError, match="2 token ids given for 3 tokens"):
        router(hidden, ids[:2])


def test_hash_table_is_fair_and_without_repeats() -> None:
    table = hash_table(9000, LayerShape("h", 8, 4, 16, 4, 4, "hash"), 1, 0)
    assert table.shape == (9000, 4)
    assert all(len(set(row)) == 4 for row in table.tolist())
    counts = torch.bincount(table.flatten(), minlength=16)
    assert (counts - 2250).abs().max() < 6 * 2250**0.5


def test_weights_depend_on_what_they_are_for_alone() -> None:
    shape = shape_of("tiny")
    one, two = RandomWeights(shape, 3), RandomWeights(shape, 3)
    assert torch.equal(one.routed(1, 2)[0], two.routed(1, 2)[0])
    different = [one.routed(1, 3)[0], one.routed(2, 2)[0], one.shared(1)[0], RandomWeights(shape, 4).routed(1, 2)[0]]
    assert not any(torch.equal(one.routed(1, 2)[0], other) for other in different)
    assert one.routed(0, 0)[0].std().item() == pytest.approx(shape.hidden**-0.5, rel=0.1)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that launch a kernel on a GPU. Views launch none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.number += name not in ("view", "_unsafe_view", "t", "transpose", "slice", "unsqueeze", "expand", "alias")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rule", "chosen", "forced"), [("softmax", 9, 11), ("sigmoid-groups", 11, 13)])
def test_a_router_launches_no_more_than_it_must(rule: RouterRule, chosen: int, forced: int) -> None:
    """In small batches these launches are the phase: a check of scores by element alone took eight."""
    router = make_router(LayerShape("x", 32, 8, 16, 4, router=rule, scaling=2.5 if "sig" in rule else 1.0), 0, 0, CPU,
                         torch.bfloat16)  # fmt: skip
    hidden, ids = torch.randn(6, 32).bfloat16(), torch.arange(24).view(6, 4) % 16
    for given, most in ((None, chosen), (ids, forced)):
        with Launches() as counted:
            routing = router(hidden, forced_ids=given)
        assert counted.number == most
        assert torch.equal(routing.total, routing.weight_basis.sum())


def test_one_bad_score_shows_in_their_total() -> None:
    shape = LayerShape("x", 32, 8, 16, 4)
    router = make_router(shape, 0, 0, CPU, torch.float32)
    scores = torch.rand(6, 16)
    scores[2, 3:9] = -torch.inf  # not known
    assert float(router(torch.zeros(6, 32), None, None, scores).total) == pytest.approx(
        float(scores.clamp(min=0).sum())
    )
    for bad in (torch.nan, torch.inf):
        scores[4, 5] = bad
        assert not router(torch.zeros(6, 32), None, None, scores).total.isfinite()
    assert router(torch.zeros(0, 32)).total == 0


def test_shapes_say_what_the_models_say() -> None:
    v3 = SHAPES["deepseek-v3-layer"]
    assert (v3.expert_bytes, v3.shared_cost, v3.num_layers) == (3 * 7168 * 2048 * 2, 1.0, 58)
    assert not SHAPES["qwen3-30b-a3b-layer"].has_shared
    assert SHAPES["qwen3-30b-a3b-layer"].shared_cost == 0
    with pytest.raises(ValueError, match="unknown layer shape 'v4': give one of deepseek-v3-layer, "):
        shape_of("v4")
    with pytest.raises(ValueError, match="has no moe_intermediate_size"):
        shape_of_config({"hidden_size": 4}, "m")
    with pytest.raises(ValueError, match="top-k 5 of 4 experts that can be chosen"):
        LayerShape("x", 8, 8, 8, 5, groups=4, top_groups=2)
