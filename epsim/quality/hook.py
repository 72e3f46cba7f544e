"""Applies a router policy to a live model: a forward hook on each router replaces the router's choice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from epsim.policies.base import Router, RouterWork
from epsim.traces.routers import WEIGH_RULES, find_routers


class Reroute(Protocol):
    """Replaces the router's choice in one layer, for N batches of B tokens each.

    scores [N, B, E] float32: the scores by which the router chose. weight_basis [N, B, E] float32: the values to which
    the router's weights are proportional. expert_ids [N, B, k] int64, weights [N, B, k]: the router's choice; -1 in
    rows of padding tokens. Returns expert ids and weights [N, B, k'] of the same types. A token with fewer than k'
    experts has id -1 and weight 0 in the remaining columns.
    """

    def __call__(
        self, scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def keep(
    scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `Reroute` of `topk`: keeps the model's choice."""
    return expert_ids, weights


def reroute_of(router: Router, num_ranks: int = 1) -> Reroute:
    """The `Reroute` of a stack's router. The model's experts are on num_ranks ranks in contiguous shares. The tokens of
    a batch are routed together, whatever their source ranks."""
    if not router.acts:
        return keep

    def act(
        scores: torch.Tensor, weight_basis: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decode = torch.ones(expert_ids.shape[:-1], dtype=torch.bool, device=expert_ids.device)
        holds = contiguous_ranks(scores.shape[-1], num_ranks, scores.device)
        routed = router.route(RouterWork(scores, weight_basis, expert_ids, weights, decode, holds))
        return routed.expert_ids, routed.weights

    return act


def contiguous_ranks(num_experts: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Whether a rank holds an expert, [E, R] bool. Raises ValueError if num_ranks does not divide num_experts."""
    if num_experts % num_ranks:
        raise ValueError(f"--ranks {num_ranks} do not divide the model's {num_experts} experts")
    return torch.eye(num_ranks, dtype=torch.bool, device=device).repeat_interleave(num_experts // num_ranks, 0)


@contextmanager
def rerouted(
    model: Any, reroute: Reroute, whole_sequences: bool, batch_size: int | None = None, end_id: int | None = None
) -> Iterator[None]:
    """Inside the `with`, `reroute` routes every pass of the model.

    whole_sequences: if True, a pass of B sequences of n tokens counts as n decode steps; step t holds each sequence's
    t-th token. If False, a pass with several tokens per sequence is prefill and keeps the model's choice.
    batch_size: number of sequences that are routed together; it divides the number in a pass. None for all of them.
    end_id: the token that ended sequences continue with. It is padding and activates no expert.
    """
    if reroute is keep:
        yield
        return
    shape = [0, 0]
    ended: list[torch.Tensor] = []

    def note_shape(ids: torch.Tensor) -> None:
        shape[:] = ids.shape
        ended[:] = [] if end_id is None or shape[1] > 1 else [ids == end_id]

    handles = [before_passes(model, "a router policy", note_shape)]
    for router in find_routers(model):

        def act(module: Any, inputs: Any, output: Any, router: Any = router) -> Any:
            batch, length = shape
            if length > 1 and not whole_sequences:
                return output
            first, weights, ids = output
            together = batch_size or batch

            def by_step(flat: torch.Tensor) -> torch.Tensor:
                groups = flat.reshape(batch // together, together, length, -1)
                return groups.transpose(1, 2).reshape(batch // together * length, together, -1)

            def by_sequence(stepped: torch.Tensor) -> torch.Tensor:
                groups = stepped.reshape(batch // together, length, together, -1)
                return groups.transpose(1, 2).reshape(batch * length, -1)

            chosen = ids.masked_fill(ended[0], -1) if ended else ids
            scores = router.scores(first)
            weight_basis = router.weight_basis(first, scores)
            compared = by_step(scores)
            # If both are the same tensor, convert it once.
            proportions = compared if weight_basis is scores else by_step(weight_basis)
            new_ids, new_weights = reroute(compared, proportions, by_step(chosen), by_step(weights))
            new_ids = by_sequence(filled(new_ids, by_step(ids)))
            return first, by_sequence(new_weights).to(weights.dtype), new_ids

        handles.append(router.module.register_forward_hook(act))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def before_passes(model: Any, who: str, note: Callable[[torch.Tensor], None]) -> Any:
    """Calls note(input_ids) before every pass of the model. Returns a handle whose `remove` ends this. who: names the
    caller in the error for a pass without input_ids."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise ValueError(f"{who} needs a model that is called with input_ids")
        note(ids)

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def filled(new_ids: torch.Tensor, model_ids: torch.Tensor) -> torch.Tensor:
    """new_ids [N, B, k'] with a valid expert in place of every -1 (its weight is 0). model_ids [N, B, k]. The valid
    expert is the token's first expert, or for padding one that the batch has, so no other expert is read."""
    of_batch = new_ids.amax((-2, -1), keepdim=True)
    spare = torch.where(new_ids[..., :1] >= 0, new_ids[..., :1], of_batch)
    spare = torch.where(spare >= 0, spare, model_ids[..., :1])
    return torch.where(new_ids >= 0, new_ids, spare)


def check_rules(model: Any) -> None:
    """Raises ValueError if it is unknown how one of the model's routers computes its weights."""
    for router in find_routers(model):
        name = type(router.module).__name__
        if name not in WEIGH_RULES:
            raise ValueError(f"a router policy cannot act on {name}, only on {', '.join(WEIGH_RULES)}")
