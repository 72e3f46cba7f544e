"""Decoding step by step equals transformers' own generate, also under a policy, and leaves ended sequences alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from epsim.policies.stack import parse_stack
from epsim.quality.decoding import Decoder, generate
from epsim.quality.hook import keep, reroute_of, rerouted
from epsim.quality.meter import Meter
from epsim.traces.model import tokens
from tests.quality.test_evaluate import make_model


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(1, 64, (6, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("stack", ["topk", "oea(k0=1)", "pruned(k0=1)"])
def test_greedy_tokens_are_those_of_transformers(model: Any, prompts: torch.Tensor, stack: str) -> None:
    reroute = reroute_of(parse_stack(stack).router)
    with rerouted(model, reroute, whole_sequences=False, end_id=tokens.END_ID):
        theirs = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=30,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokens.END_ID,
            eos_token_id=tokens.END_ID,
        )
    decoder = Decoder(model, reroute, 6, 39, sample=False)
    decoder.start(prompts)
    for _ in range(29):
        decoder.step()
    length = theirs.shape[1]
    assert torch.equal(decoder.written[:, :length], theirs)
    assert (decoder.written[:, length:] == tokens.END_ID).all()


def test_a_second_start_forgets_the_first(model: Any, prompts: torch.Tensor) -> None:
    decoder = Decoder(model, keep, 6, 20, sample=False)
    found = []
    for begin in (prompts, prompts.flip(0), prompts[:, :5], prompts):
        decoder.start(begin)
        for _ in range(10):
            decoder.step()
        found.append(decoder.written.clone())
    assert torch.equal(found[0], found[3])
    assert torch.equal(found[0].flip(0), found[1])
    assert (found[2][:, 16:] == tokens.END_ID).all()


def test_ended_sequences_stay_ended_and_wake_no_expert(model: Any, prompts: torch.Tensor) -> None:
    meter = Meter(reroute_of(parse_stack("pruned(k0=2)").router))
    decoder = Decoder(model, meter, 6, 40)
    decoder.start(prompts)
    decoder.tokens[1:] = tokens.END_ID
    decoder._ended[1:] = True
    decoder.step()
    assert meter.active_experts() == {1: 2.0}
    for _ in range(20):
        decoder.step()
    assert (decoder.written[1:, 10:31] == tokens.END_ID).all()


def test_sampling_takes_the_likeliest_in_proportion(model: Any) -> None:
    """One prompt many times: first tokens follow the softmax, cut at the 95% of the likeliest."""
    prompt = torch.tensor([[3, 9, 4]]).expand(4000, -1)
    logits = model(input_ids=prompt[:1]).logits[0, -1].double()
    probability, order = logits.softmax(-1).sort(descending=True)
    kept = probability.cumsum(-1) - probability < 0.95
    wanted = torch.zeros(64, dtype=torch.float64)
    wanted[order[kept]] = probability[kept] / probability[kept].sum()
    found = generate(model, keep, prompt, 1, seed=0)[:, 0].bincount(minlength=64) / 4000
    assert (found[wanted == 0] == 0).all()
    error = (wanted * (1 - wanted) / 4000).sqrt()
    assert ((found - wanted).abs() <= 5 * error + 1e-9).all()


def test_no_room(model: Any, prompts: torch.Tensor) -> None:
    decoder = Decoder(model, keep, 6, 10)
    decoder.start(prompts)
    with pytest.raises(ValueError, match="all 10 tokens are written"):
        decoder.step()
    with pytest.raises(ValueError, match="give 6 of 1 to 9 tokens"):
        decoder.start(prompts[:, :0])
    with pytest.raises(ValueError, match="positions"):
        Decoder(model, keep, 6, 10_000)
