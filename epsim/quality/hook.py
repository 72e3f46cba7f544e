"""Where a router policy acts on a live model: one forward hook on each router, between choosing and computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from epsim.policies.base import Router
from epsim.policies.base import TopK as TopKRouter
from epsim.traces.routers import find_routers


class Reroute(Protocol):
    """Chooses experts anew for N batches of B tokens each, of one layer.

    scores [N, B, E] float32: what the model's router chose by; expert_ids [N, B, k] int64 and weights [N, B, k]: its
    choice. Returns expert ids and weights [N, B, k'] of the same types; tokens that take fewer than k' experts fill up
    with any expert at weight 0.
    """

    def __call__(
        self, scores: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def keep(scores: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk`: the model's own choice."""
    return expert_ids, weights


def reroute_of(router: Router) -> Reroute:
    """What a stack's router does to a live model."""
    if isinstance(router, TopKRouter):
        return keep
    raise ValueError(f"router {router.name} cannot act on a live model: evaluate topk")


@contextmanager
def rerouted(model: Any, reroute: Reroute, whole_sequences: bool) -> Iterator[None]:
    """Every pass of the model inside the `with` is routed by `reroute`.

    whole_sequences: a pass of B sequences of n tokens stands for n decode steps, the t-th of which holds each
    sequence's t-th token. Otherwise passes of several tokens a sequence (prefill) keep the model's choice.
    """
    shape = [0, 0]

    def note_shape(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise ValueError("a router policy needs a model that is called with input_ids")
        shape[:] = ids.shape

    handles = [model.register_forward_pre_hook(note_shape, with_kwargs=True)]
    for router in find_routers(model):

        def act(module: Any, inputs: Any, output: Any, router: Any = router) -> Any:
            batch, length = shape
            if length > 1 and not whole_sequences:
                return output
            first, weights, ids = output

            def by_step(flat: torch.Tensor) -> torch.Tensor:
                return flat.view(batch, length, -1).transpose(0, 1)

            def by_sequence(stepped: torch.Tensor) -> torch.Tensor:
                return stepped.transpose(0, 1).reshape(batch * length, -1)

            new_ids, new_weights = reroute(by_step(router.scores(first)), by_step(ids), by_step(weights))
            return first, by_sequence(new_weights), by_sequence(new_ids)

        handles.append(router.module.register_forward_hook(act))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
