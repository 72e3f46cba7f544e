"""The work that a block of steps gives each rank, after all policies."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The load of S steps, L layers and R ranks (docs/contract.md section 1).

    routed [S, L, R]: (token, expert) assignments that a rank serves; int64 if rounded, float64 if real-valued.
    routed_real [S, L, R] float64: the same before rounding or drawing.
    shared_tokens [S, L, R]: tokens whose shared expert a rank serves; int64 if rounded, else float64.
    shared [S, L, R] float64: shared_tokens times the shared expert's cost in routed assignments.
    tokens [S, L] float64: tokens of the layer. assignments [S, L] int64.
    active [S, L, R] int64: a rank's physical routed experts with load.
    rounded: whether loads are whole, as in the runtime, or expected values.
    remote_rank, remote_node [S, L] int64: routed assignments that leave their source rank or node.
    shared_remote_rank, shared_remote_node [S, L] int64: the same for shared-expert tokens. None at counts level.
    rank_rows [S, L, R, R], node_rows [S, L, R, N] float64: tokens sent from each source rank to each rank or node. A
    token counts once per destination (`epsim.policies.rows`). None at counts level, or without `Setting.rows`.
    tiles [S, L, R] float64: tiles that a rank's routed experts fill, rounded up per expert; None without
    `Setting.tile`.
    kept_mass [S, L] float64: scores of the experts that tokens take, divided by those of the model's choice; None
    without a router policy.
    """

    routed: Tensor
    routed_real: Tensor
    shared: Tensor
    shared_tokens: Tensor
    tokens: Tensor
    assignments: Tensor
    active: Tensor
    rounded: bool
    remote_rank: Tensor | None = None
    remote_node: Tensor | None = None
    shared_remote_rank: Tensor | None = None
    shared_remote_node: Tensor | None = None
    rank_rows: Tensor | None = None
    node_rows: Tensor | None = None
    kept_mass: Tensor | None = None
    tiles: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """routed + shared, [S, L, R] float64."""
        return self.routed + self.shared


def joined(loads: list[Load]) -> Load:
    """Concatenates loads of one stack and level along the steps."""
    if len(loads) == 1:
        return loads[0]
    parts: dict[str, Any] = {"rounded": loads[0].rounded}
    for field in dataclasses.fields(Load):
        values = [getattr(load, field.name) for load in loads]
        if field.name not in parts:
            parts[field.name] = None if values[0] is None else torch.cat(values)
    return Load(**parts)
