"""Records the sample trace: the trained model's routing of held-out text and of the continuations it samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsim.traces.model import tokens
from epsim.traces.model.options import RecordOptions
from epsim.traces.model.train import device_name, load_model
from epsim.traces.overhead import Overhead, measure_overhead
from epsim.traces.record import record
from epsim.traces.store import StoredTrace

COMMAND = "epsim model corpus && epsim model train && epsim model record --out sample.parquet"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The written trace, and what recording cost in a prefill pass and in a decode pass."""

    path: Path
    num_steps: int
    num_bytes: int
    device: str
    prefill: Overhead
    decode: Overhead


class Prompts:
    """Hands out pieces of held-out text, each at most once."""

    def __init__(self, heldout: dict[str, tokens.Tokens], length: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.pieces: dict[str, Iterator[tokens.Tokens]] = {}
        for name, ids in heldout.items():
            count = len(ids) // length
            rows = ids[: count * length].reshape(count, length)
            self.pieces[name] = iter(rows[random.permutation(count)])

    def take(self, labels: list[str], length: int) -> torch.Tensor:
        """Token ids of new pieces of these domains, [len(labels), length] int64."""
        try:
            rows = [next(self.pieces[label])[:length] for label in labels]
        except StopIteration:
            raise ValueError("the held-out text is too short for so many cycles: lower --cycles") from None
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def record_model(model: Any, heldout: dict[str, tokens.Tokens], options: RecordOptions) -> None:
    """Writes the trace: prefill steps with expert ids, decode steps with the scores of all experts."""
    config, device = model.config, next(model.parameters()).device
    domains = sorted(heldout)
    prompts = Prompts(heldout, max(options.prompts), options.seed)
    torch.manual_seed(options.seed)
    source = (
        f"a model of {config.num_hidden_layers} layers, {config.num_experts} experts, top-{config.num_experts_per_tok} "
        f"and one shared expert, trained by this project on text of Debian packages; made with `{COMMAND}`"
    )

    def labels(batch: int, domain: int | None) -> list[str]:
        return [domains[i % len(domains)] if domain is None else domains[domain] for i in range(batch)]

    with record(
        model,
        options.out,
        num_scores="all",
        num_source_ranks=options.num_source_ranks,
        model_name="epsim-small",
        source=source,
        notes=(
            "prefill steps keep expert ids only",
            "decode steps are sampled continuations of the prefill before them",
        ),
    ) as recorder:
        recorder.scored_phases = ("decode",)
        for cycle in range(options.cycles):
            first, second = cycle % len(domains), (cycle + len(domains) // 2) % len(domains)
            # The domains of the small run, the large run and the lone prefill step; None mixes all domains.
            plan = [(None, first, second), (first, None, second), (first, second, None)][cycle % 3]
            for run in range(2):
                recorder.domains = labels(options.batches[run], plan[run])
                prompt = prompts.take(list(recorder.domains), options.prompts[run]).to(device)
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=options.continuations[run],
                    do_sample=True,
                    top_k=0,
                    top_p=0.95,
                    use_cache=True,
                    pad_token_id=tokens.END_ID,
                )
            recorder.domains = labels(options.batches[0], plan[2])
            model(prompts.take(list(recorder.domains), options.prompts[0]).to(device))


def record_sample(options: RecordOptions) -> Recorded:
    """Records the trained model. Raises ValueError if the corpus or the model is missing."""
    model = load_model(options.cache, options.device)
    heldout = tokens.load(options.cache).heldout
    record_model(model, heldout, options)
    device = next(model.parameters()).device
    scratch = options.out.with_name(f".{options.out.name}.overhead")
    sizes = {"prefill": (options.batches[0], options.prompts[0]), "decode": (options.batches[1], 1)}
    costs: dict[str, Overhead] = {}
    for name, size in sizes.items():
        inputs = {"input_ids": torch.randint(1, model.config.vocab_size, size, device=device)}
        num_scores: Any = "all" if name == "decode" else 0
        costs[name] = measure_overhead(
            model, inputs, scratch, num_scores=num_scores, num_source_ranks=options.num_source_ranks
        )
    scratch.unlink()
    num_bytes = options.out.stat().st_size
    num_steps = StoredTrace(options.out).num_steps
    return Recorded(options.out, num_steps, num_bytes, device_name(str(device)), costs["prefill"], costs["decode"])
