"""Measures tokens per second of the whole small model under router policies, and under its own choice of experts."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from epsim.policies.stack import parse_stack
from epsim.quality.decoding import Decoder, small_batch_experts
from epsim.quality.evaluate import MIXED, evaluation_text, small_model
from epsim.quality.hook import Reroute, check_rules, reroute_of
from epsim.quality.meter import Meter
from epsim.quality.options import GenerateOptions
from epsim.traces.model import tokens

COUNTED = 32
"""Number of decode steps in which active experts are counted. They are not timed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a stack at decode. tokens_per_second [rounds]. active_experts: mean per step and layer.
    written [B, tokens]: the continuations of the last round."""

    stack: str
    tokens_per_second: list[float]
    active_experts: float
    written: torch.Tensor = field(repr=False)


def generate_text(options: GenerateOptions) -> dict[str, Any]:
    """Measures the speed of each stack. Returns the figures and a continuation of each stack, and writes them to `out`
    if it is given."""
    stacks = list({str(parse_stack(stack)): stack for stack in ("topk", *options.stacks)}.values())
    model, about = small_model(options.cache, options.device)
    if len(stacks) > 1:
        check_rules(model)
    corpus = tokens.load(options.cache)
    text = evaluation_text(corpus.heldout, tuple(corpus.heldout), options.batch, options.prompt)
    prompts = text.get(MIXED, next(iter(text.values())))[:, : options.prompt].to(model.device)
    with small_batch_experts(model) if options.experts == "kernel" else nullcontext():
        speeds = decode_speed(model, stacks, prompts, options.num_tokens, options.rounds, options.seed)
    result: dict[str, Any] = {
        **about,
        "experts": options.experts,
        "batch": options.batch,
        "prompt": options.prompt,
        "tokens": options.num_tokens,
        "rounds": options.rounds,
        "seed": options.seed,
        "stacks": {
            speed.stack: {
                "tokens_per_second": float(np.median(speed.tokens_per_second)),
                "over_topk": gain,
                "active_experts": speed.active_experts,
                "rounds": speed.tokens_per_second,
                "text": corpus.tokenizer.decode(speed.written[0].tolist()),
            }
            for speed, gain in zip(speeds, gains(speeds), strict=True)
        },
    }
    options.write(result)
    return result


def decode_speed(
    model: Any, stacks: Sequence[str], prompts: torch.Tensor, num_tokens: int, rounds: int, seed: int
) -> list[Speed]:
    """Measures decoding. In every round each stack in turn continues prompts [B, n] by num_tokens tokens, as one batch
    in which no sequence ends. On a GPU a step is one CUDA graph, timed by device events. Prefill is not timed."""
    if not stacks or rounds < 1 or num_tokens < 2:
        raise ValueError("give at least one stack, one round and two tokens")
    reroutes = [reroute_of(parse_stack(stack).router) for stack in stacks]
    active = [_count(model, reroute, prompts, min(num_tokens, COUNTED), seed) for reroute in reroutes]
    decoders = [_decoder(model, reroute, prompts, num_tokens) for reroute in reroutes]
    if prompts.is_cuda:
        for decoder in decoders:
            decoder.capture(prompts)
    seconds: list[list[float]] = [[] for _ in stacks]
    for number in range(rounds):
        for stack_seconds, decoder in zip(seconds, decoders, strict=True):
            torch.manual_seed(seed + number)
            decoder.start(prompts)
            stack_seconds.append(_timed(decoder, num_tokens - 1))
    total = len(prompts) * (num_tokens - 1)
    return [
        Speed(stack, [total / s for s in stack_seconds], experts, decoder.written[:, prompts.shape[1] :].cpu())
        for stack, stack_seconds, experts, decoder in zip(stacks, seconds, active, decoders, strict=True)
    ]


def gains(speeds: Sequence[Speed]) -> list[float]:
    """Each stack's speed over the first stack's speed in the same round: medians over rounds."""
    first = np.array(speeds[0].tokens_per_second)
    return [float(np.median(np.array(speed.tokens_per_second) / first)) for speed in speeds]


def _decoder(model: Any, reroute: Reroute, prompts: torch.Tensor, num_tokens: int) -> Decoder:
    return Decoder(model, reroute, len(prompts), prompts.shape[1] + num_tokens, endless=True)


def _count(model: Any, reroute: Reroute, prompts: torch.Tensor, num_tokens: int, seed: int) -> float:
    meter = Meter(reroute)
    decoder = _decoder(model, meter, prompts, num_tokens)
    torch.manual_seed(seed)
    decoder.start(prompts)
    decoder.steps(num_tokens - 1)
    return meter.active_experts()[1]


def _timed(decoder: Decoder, steps: int) -> float:
    """The seconds that `steps` steps take."""
    if decoder.tokens.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        decoder.steps(steps)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    decoder.steps(steps)
    return time.perf_counter() - started
