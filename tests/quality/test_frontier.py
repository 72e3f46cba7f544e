"""Router policies on a live model, what they read, and the comparison of frontiers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from epsim.policies.stack import parse_stack
from epsim.quality import evaluate
from epsim.quality.decoding import generate
from epsim.quality.hook import check_rules, filled, keep, reroute_of, rerouted
from epsim.quality.meter import Meter
from epsim.traces.model import tokens
from epsim.traces.routers import find_routers
from tests.benchmarks.scripts import script
from tests.policies.oea_reading import two_phases
from tests.quality.test_evaluate import first_only, make_model, save_cache

frontier: Any = script("quality.frontier")
claims_of: Any = script("quality.oea_claims")
Point, Trial = frontier.Point, frontier.Trial


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(1, 64, (8, 13), generator=torch.Generator().manual_seed(3))


def seen_by_experts(model: Any) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Any]]:
    """What each layer's experts are given: (ids, weights) [T, k']."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    return seen, [
        router.experts.register_forward_pre_hook(lambda module, args: seen.append((args[1], args[2])))
        for router in find_routers(model)
    ]


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [4, 8])
def test_experts_compute_what_the_two_phases_say(model: Any, text: torch.Tensor, batch_size: int) -> None:
    logits: list[torch.Tensor] = []
    handles = [r.module.register_forward_hook(lambda m, i, o: logits.append(o[0])) for r in find_routers(model)]
    with rerouted(model, reroute_of(parse_stack("oea(k0=2)").router), True, batch_size):
        seen, more = seen_by_experts(model)
        model(input_ids=text)
    for handle in (*handles, *more):
        handle.remove()
    assert len(seen) == len(logits) == 2
    for flat, (ids, weights) in zip(logits, seen, strict=True):
        scores = flat.float().softmax(-1).double().view(8, 13, -1)
        for first in range(0, 8, batch_size):
            for t in (0, 5, 12):
                wanted, shares = two_phases(scores[first : first + batch_size, t].numpy(), 2, 4)
                for row in range(batch_size):
                    at = (first + row) * 13 + t
                    given = ids[at][weights[at] > 0].tolist()
                    assert sorted(given) == wanted[row]
                    own = {e: w for e, w in zip(ids[at].tolist(), weights[at].tolist(), strict=True) if w > 0}
                    assert all(own[e] == pytest.approx(share, rel=1e-4) for e, share in shares[row].items())
                read = {e for row in range(batch_size) for e in ids[(first + row) * 13 + t].tolist()}
                assert read == {e for row in wanted for e in row}, "filling up woke an expert"


@torch.no_grad()
def test_k_of_k_is_the_plain_model(model: Any, text: torch.Tensor) -> None:
    plain = model(input_ids=text).logits
    for router in ("oea(k0=4)", "pruned(k0=4)", "lynx(keep=16)"):
        with rerouted(model, reroute_of(parse_stack(router).router), whole_sequences=True):
            torch.testing.assert_close(model(input_ids=text).logits, plain, rtol=1e-4, atol=1e-5)
    with rerouted(model, reroute_of(parse_stack("oea(k0=1)").router), whole_sequences=True, batch_size=1):
        torch.testing.assert_close(model(input_ids=text).logits, plain, rtol=1e-4, atol=1e-5)


def test_filled() -> None:
    ids = torch.tensor([[[3, 1, -1], [5, -1, -1], [-1, -1, -1]], [[-1, -1, -1]] * 3])
    own = torch.tensor([[[3, 1], [5, 2], [7, 0]], [[4, 2], [6, 1], [8, 0]]])
    assert filled(ids, own).tolist() == [[[3, 1, 3], [5, 5, 5], [5, 5, 5]], [[4] * 3, [6] * 3, [8] * 3]]


@torch.no_grad()
def test_meter_by_hand(model: Any) -> None:
    scores = torch.tensor([[[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]], [[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]]])
    own = torch.tensor([[[0, 1], [3, 2]], [[0, 1], [0, 1]]])

    def first_of_each(
        scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(torch.tensor([True, False]), expert_ids, -1), weights

    meter = Meter(first_of_each, (1, 2))
    meter(scores - 9, scores, own, torch.ones(2, 2, 2))
    assert meter.active_experts() == {1: 1.5, 2: 1.0}
    assert meter.kept_mass() == pytest.approx((0.5 + 0.4 + 0.4 + 0.4) / (0.8 + 0.7 + 0.7 + 0.7))
    everything = Meter(keep, (1,))
    everything(scores, scores, own, torch.ones(2, 2, 2))
    assert everything.active_experts() == {1: 3.0}
    assert everything.kept_mass() == 1


@torch.no_grad()
def test_padding_after_the_end_wakes_no_expert(model: Any) -> None:
    """Sequence 1 is over: the batch reads what sequence 0 alone would."""
    router = parse_stack("pruned(k0=2)").router
    meter, alone = Meter(reroute_of(router)), Meter(reroute_of(router))
    with rerouted(model, meter, whole_sequences=False, end_id=tokens.END_ID):
        model(input_ids=torch.tensor([[7], [tokens.END_ID]]))
    with rerouted(model, alone, whole_sequences=False, end_id=tokens.END_ID):
        model(input_ids=torch.tensor([[7]]))
    assert meter.active_experts() == alone.active_experts() == {1: 2.0}


def test_generation_under_a_policy(model: Any, text: torch.Tensor) -> None:
    plain = generate(model, keep, text, 60, seed=0)
    same = generate(model, reroute_of(parse_stack("oea(k0=4)").router), text, 60, seed=0)
    other = generate(model, reroute_of(parse_stack("pruned(k0=1)").router), text, 60, seed=0)
    assert torch.equal(plain, same)
    assert torch.equal(plain[:, 0], other[:, 0])
    assert not torch.equal(plain, other)
    assert torch.equal(other, generate(model, first_only, text, 60, seed=0))


def test_measure_against_one_evaluation_each(model: Any, text: torch.Tensor) -> None:
    trials = [
        (Trial("topk", "topk"), 4),
        (Trial("oea", "oea(k0=1)"), 4),
        (Trial("oea", "oea(k0=1)"), 8),
        (Trial("oea-ep 4", "oea-ep(k0=1)", 4), 8),
    ]
    points, plain = frontier.measure(model, text, trials, chunk=8)
    for point, (trial, batch_size) in zip(points, trials, strict=True):
        one = Meter(reroute_of(parse_stack(trial.router).router, trial.ranks), (1, 4))
        loss = evaluate.loss_in_batches(model, one, text, batch_size)
        assert plain == pytest.approx(loss.plain, rel=1e-5)
        assert point.delta == pytest.approx(loss.cross_entropy - loss.plain, abs=1e-5)
        assert point.kl == pytest.approx(loss.kl, abs=1e-5)
        assert point.active[1] == pytest.approx(one.active_experts()[1])
        assert point.active[4] == pytest.approx(one.active_experts()[4])
        assert point.by_sequence.shape == (8,)
    assert points[0].delta == points[0].kl == 0
    assert points[0].kept_mass == 1
    assert frontier.active_without_policy(model, text, (4,), chunk=8)[4] == pytest.approx(points[0].active[1])
    # The same base, but more of it is read at 8 than at 4; ranks with slack read more.
    assert points[1].active[1] < points[2].active[1] < points[3].active[1]
    assert points[2].kept_mass < points[3].kept_mass


def point(family: str, router: str, active: float, delta: float, spread: float = 0.0, ranks: int = 1) -> Any:
    by_sequence = delta + spread * np.array([-1.0, 1.0, -1.0, 1.0])
    return Point(
        Trial(family, router, ranks), 16, {1: active, 4: active / 3, 8: active / 5}, 0.9, delta, delta, by_sequence
    )


def test_frontiers_by_hand() -> None:
    points = [
        point("oea", f"oea(k0={i})", a, d) for i, (a, d) in enumerate([(10, 0.4), (20, 0.2), (15, 0.5), (30, 0.25)])
    ]
    assert [p.active[1] for p in frontier.pareto(points)] == [10, 20]
    assert frontier.loss_at(points, 15) == pytest.approx(0.3)
    assert frontier.loss_at(points, 9) is frontier.loss_at(points, 21) is None


def test_claims_tell_who_loses_less() -> None:
    points = [point("topk", "topk", 40, 0.0)]
    for k0, active, delta in ((1, 10, 0.4), (2, 20, 0.2), (3, 30, 0.1)):
        points += [
            point("oea", f"oea(k0={k0})", active, delta),
            point("pruned", f"pruned(k0={k0})", active, 2 * delta),
            point("lynx", f"lynx(keep={active})", active, delta / 2, spread=0.001),
            point("oea general", f"oea(k0={k0},maxp=4)", active, delta + 0.05, spread=0.001),
            point("oea general", f"oea(k0={k0},kmax=5)", active, delta - 0.001, spread=0.01),
            point("oea-ep 4", f"oea-ep(k0={k0})", active + 5, delta / 2, ranks=4),
        ]
    claims = {claim.words: claim for claim in claims_of.check_claims(points, 4)}
    holds = {words: claim.holds for words, claim in claims.items()}
    assert holds.pop("OEA's frontier is at or under lynx's, batch 16") is False
    assert holds.pop("kmax > k does not help, batch 16") is False, "its mean is above zero"
    assert holds.pop("OEA's frontier is at or under that of masking low demand, batch 16") is None
    assert holds.pop("oea-ep loses no more than oea at the same k0, 8 ranks, batch 16") is None
    assert all(holds.values())
    assert len(holds) == 5
    paired = claims["OEA loses no more than pruning at the same k0, batch 16"]
    assert paired.worst == pytest.approx(-0.1)
    assert paired.mean == pytest.approx(-0.7 / 3)
    assert [row["k0"] for row in paired.detail] == [1, 2, 3]


def test_trials_are_stacks_and_divide() -> None:
    trials = list(frontier.default_trials(8, 64, {8: 30.0, 16: 40.0}))
    for trial, _ in trials:
        parse_stack(trial.router)
    assert len(trials) == len({(trial, size) for trial, size in trials})
    assert {size for trial, size in trials if trial.family == "oea general"} == {16}
    assert "k0=3,maxp=8" in frontier.sweep_of(8, 64)
    with pytest.raises(ValueError, match="do not divide"):
        frontier.measure(None, torch.zeros(8, 4), [(Trial("topk", "topk"), 3)], chunk=8)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    """DeepSeek-V3's router: chosen by sigmoid plus bias within 2 of 4 groups, weighed by the sigmoid, times 2.5."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "max_position_embeddings": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    }
    config = DeepseekV3Config(**given)
    model: Any = DeepseekV3ForCausalLM(config)
    model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for router in find_routers(model):
        router.module.e_score_correction_bias.copy_(torch.randn(16) * 0.3)
    return model


@torch.no_grad()
def test_deepseeks_experts_are_compared_with_bias_and_weighed_without(deepseek: Any, text: torch.Tensor) -> None:
    outputs: list[Any] = []
    handles = [r.module.register_forward_hook(lambda m, i, o: outputs.append(o)) for r in find_routers(deepseek)]
    seen, others = seen_by_experts(deepseek)
    check_rules(deepseek)
    # The first of the hooks sees what the model itself says.
    with rerouted(deepseek, reroute_of(parse_stack("oea(k0=2)").router), whole_sequences=True):
        deepseek(input_ids=text)
    for handle in (*handles, *others):
        handle.remove()
    beyond = 0
    for (logits, _, own), (ids, weights), router in zip(outputs, seen, find_routers(deepseek), strict=True):
        chance = logits.double().sigmoid()
        compared = (logits.float().sigmoid() + router.module.e_score_correction_bias).tolist()
        for t in range(13):
            batch = [sequence * 13 + t for sequence in range(8)]
            order = {
                n: sorted(range(16), key=lambda e, n=n: (e not in own[n].tolist(), -compared[n][e]))  # type: ignore[misc]
                for n in batch
            }
            loaded = {e for n in batch for e in order[n][:2]}
            for n in batch:
                wanted = [e for e in order[n] if e in loaded][:4]
                there = weights[n] > 0
                assert ids[n][there].tolist() == wanted
                share = chance[n, wanted] / chance[n, wanted].sum()
                torch.testing.assert_close(weights[n][there].double(), 2.5 * share, rtol=1e-5, atol=0)
                beyond += not set(wanted) <= set(own[n].tolist())
    assert beyond > 20


@torch.no_grad()
def test_deepseek_under_its_own_choice_and_under_ranks(deepseek: Any, text: torch.Tensor) -> None:
    plain = deepseek(input_ids=text).logits
    for stack in ("topk", "oea(k0=4)", "oea-ep(k0=4)"):
        meter = Meter(reroute_of(parse_stack(stack).router, 4), (1, 4))
        with rerouted(deepseek, meter, whole_sequences=True):
            torch.testing.assert_close(deepseek(input_ids=text).logits, plain)
        assert meter.kept_mass() == pytest.approx(1, abs=1e-12)
    found = {}
    for stack in ("pruned(k0=2)", "oea(k0=2)", "oea-ep(k0=2)"):
        found[stack] = Meter(reroute_of(parse_stack(stack).router, 4), (1, 4))
        with rerouted(deepseek, found[stack], whole_sequences=True):
            deepseek(input_ids=text)
    pruned, oea, ep = found.values()
    assert pruned.kept_mass() < oea.kept_mass() <= ep.kept_mass()
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = deepseek.generate(text, attention_mask=torch.ones_like(text), **arguments)
    with rerouted(deepseek, reroute_of(parse_stack("pruned(k0=1)").router), whole_sequences=False):
        own = deepseek.generate(text, attention_mask=torch.ones_like(text), **arguments)
    assert torch.equal(own[:, :14], wanted[:, :14]), "prefill was touched"
    assert not torch.equal(own, wanted)


def test_a_router_of_another_rule_is_refused(model: Any) -> None:
    check_rules(model)

    class Gemma4TextRouter(torch.nn.Module):
        pass

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = Gemma4TextRouter(), torch.nn.Identity()

    with pytest.raises(ValueError, match="cannot act on Gemma4TextRouter, only on Qwen3MoeTopKRouter"):
        check_rules(torch.nn.Sequential(Block()))
    with pytest.raises(ValueError, match="--ranks 3 do not divide the model's 16 experts"):
        router = reroute_of(parse_stack("oea-ep(k0=1)").router, 3)
        with torch.no_grad(), rerouted(model, router, whole_sequences=True):
            model(input_ids=torch.tensor([[7], [8]]))


def test_evaluate_from_the_cache(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from epsim.cli.main import main

    save_cache(model, tmp_path)
    arguments = "model evaluate --policy oea-ep(k0=1) --ranks 4 --sequences 4 --length 16 --generated 12"
    arguments += " --generations 2 --device cpu --batch-size 1 --batch-size 4 --domain a"
    arguments += f" --cache {tmp_path} --out {tmp_path / 'e.json'}"
    monkeypatch.setattr("sys.argv", ["epsim", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    result = json.loads((tmp_path / "e.json").read_text())
    alone, four = result["loss"]["a"]["1"], result["loss"]["a"]["4"]
    assert alone["kl"] == pytest.approx(0, abs=1e-8)
    assert alone["active_experts"]["1"] == 4
    assert alone["kept_mass"] == 1
    assert four["kl"] > 1e-6
    # Bases of four tokens, filled up on four ranks to the busiest one's number.
    assert 4 < four["active_experts"]["1"] <= 4 * four["active_experts"]["4"]
    assert 0.5 < four["kept_mass"] < 1
    printed = capsys.readouterr().out
    assert "most of 4" in printed
    assert f"{four['kept_mass']:.4f}" in printed
    monkeypatch.setattr("sys.argv", ["epsim", *arguments.replace("--ranks 4", "--ranks 3").split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code != 0
    assert "--ranks 3 do not divide the model's 16 experts" in capsys.readouterr().err
