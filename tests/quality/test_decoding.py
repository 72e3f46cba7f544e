"""Decoding step by step equals transformers' own generate, also under a policy, and leaves ended sequences alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from epsim.policies.stack import parse_stack
from epsim.quality.decoding import Decoder, generate, small_batch_experts
from epsim.quality.hook import keep, reroute_of, rerouted
from epsim.quality.meter import Meter
from epsim.quality.speed import Speed, decode_speed, gains
from epsim.traces.model import tokens
from tests.quality.test_evaluate import make_model, save_cache


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


@torch.no_grad()
@pytest.mark.parametrize("stack", ["topk", "oea(k0=1)", "pruned(k0=1)"])
def test_experts_of_small_batches_give_the_models_own_outputs(model: Any, prompts: torch.Tensor, stack: str) -> None:
    reroute = reroute_of(parse_stack(stack).router)

    def logits(tokens_of_all: torch.Tensor) -> torch.Tensor:
        with rerouted(model, reroute, whole_sequences=True):
            out: torch.Tensor = model(input_ids=tokens_of_all).logits
        return out

    for given in (prompts, prompts.repeat(2, 1)):  # 54 rows, and 108: too many for the small form.
        own = logits(given)
        with small_batch_experts(model):
            found = logits(given)
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
        assert torch.equal(logits(given), own)


def test_speed_counts_what_was_decoded(model: Any, prompts: torch.Tensor) -> None:
    speeds = decode_speed(model, ["topk", "pruned(k0=1)"], prompts, 8, 3, seed=1)
    assert [speed.stack for speed in speeds] == ["topk", "pruned(k0=1)"]
    assert all(len(speed.tokens_per_second) == 3 and min(speed.tokens_per_second) > 0 for speed in speeds)
    assert speeds[1].active_experts < speeds[0].active_experts <= 16
    assert all((speed.written != tokens.END_ID).all() for speed in speeds)
    torch.manual_seed(3)  # the last round's
    decoder = Decoder(model, keep, 6, 17, endless=True)
    decoder.start(prompts)
    for _ in range(7):
        decoder.step()
    assert torch.equal(decoder.written[:, 9:], speeds[0].written)
    with pytest.raises(ValueError, match="at least one stack"):
        decode_speed(model, [], prompts, 8, 3, seed=1)


def test_gains_are_medians_round_by_round() -> None:
    none = torch.zeros(1, 1)
    speeds = [Speed("topk", [1.0, 10.0, 2.0], 8, none), Speed("oea", [2.0, 11.0, 3.0], 4, none)]
    assert gains(speeds) == [1.0, 1.5]


def test_the_command(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from epsim.cli.main import main

    def run(arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["epsim", "model", "generate", "--cache", str(tmp_path), *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    save_cache(model, tmp_path)
    out = tmp_path / "speed.json"
    shape = f"--batch 4 --prompt 8 --tokens 6 --rounds 2 --device cpu --out {out}"
    assert run(f"--policy oea(k0=1) --policy topk {shape}") == 0
    assert "oea(k0=1)" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert list(result["stacks"]) == ["topk", "oea(k0=1)"]
    assert result["stacks"]["topk"]["over_topk"] == 1
    out.unlink()
    for wrong in (
        "--batch 0",
        "--tokens 1",
        "--rounds 0",
        "--prompt 0",
        "--policy nothing",
        "--tokens 1000000",
        "--experts own",
    ):
        assert run(f"{shape} {wrong}") == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not out.exists()
