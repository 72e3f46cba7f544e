"""`epsim traces`: import, show and synthesize; and the options by which any command reads foreign recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from epsim.traces.readers import ImportOptions

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Import, show and draw traces.")

TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Experts a token chooses, where the recording lacks it.")
]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Experts a layer, where the recording lacks it.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Name of the model; known names fill top-k and shared cost.")
]
PhaseOption = Annotated[str | None, typer.Option("--phase", help="prefill, decode, mixed or training.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch", help="Recordings by sequence: places of the composed decode batch.")
]
StepTokensOption = Annotated[int | None, typer.Option("--step-tokens", help="Token logs without steps: tokens a step.")]
ScoreRuleOption = Annotated[
    str | None, typer.Option("--score-rule", help="Router logits: how the model turns them into a choice.")
]


def import_options(
    top_k: int | None,
    experts: int | None,
    model: str | None,
    phase: str | None,
    shared_cost: float | None,
    batch: int | None,
    ranks: int | None,
    step_tokens: int | None,
    score_rule: str | None,
    seed: int,
) -> ImportOptions:
    from epsim.traces.readers import ImportOptions

    given: dict[str, Any] = {
        "top_k": top_k,
        "num_experts": experts,
        "model": model,
        "phase": phase,
        "shared_cost": shared_cost,
        "batch": batch,
        "ranks": ranks,
        "step_tokens": step_tokens,
        "score_rule": score_rule,
        "seed": seed,
    }
    return ImportOptions(**{name: value for name, value in given.items() if value is not None})
