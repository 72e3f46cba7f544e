"""A placement read from a file, such as the map that a serving system runs today."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from epsim.placement.base import Cluster, Placement, PlacementPolicy, Target, nearest_divisors
from epsim.placement.formats import ExpertMap, check_full, read_map, read_placement


@dataclass(frozen=True, slots=True)
class File(PlacementPolicy):
    """The placement of a file in any format of `epsim.placement.formats`. The file, not the cluster, gives the number
    of redundant experts.

    The layer numbers of the trace select the rows. vLLM-Ascend's format has no layer numbers, so its rows are the
    layers of the trace in order. Raises ValueError in one line if the file does not fit the trace or the cluster.
    """

    path: str
    name: ClassVar[str] = "file"
    first: ClassVar[str] = "path"
    other_names: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("expert-map-path", "init-expert-location", "initial-expert-map-path", "initial-global-assignments"),
        "as file(path=...), with the engine's map",
    )
    examples: ClassVar[tuple[str, ...]] = ("file(path=placement.json)",)
    needs_history: ClassVar[bool] = False

    def redundant(self, num_experts: int, cluster: Cluster) -> int:
        num_slots = max(len(row) for row in read_map(self.path).rows)
        if num_slots < num_experts:
            raise ValueError(
                f"{self.path}: {num_slots} slots a layer cannot hold the {num_experts} experts of the trace: give the "
                "map of the trace's model"
            )
        if num_slots % cluster.num_ranks:
            raise ValueError(
                f"{self.path}: {num_slots} slots a layer do not divide among {cluster.num_ranks} ranks: give the "
                f"number of ranks that the map is for, such as {nearest_divisors(num_slots, cluster.num_ranks)}"
            )
        return num_slots - num_experts

    def notes(self, num_experts: int, target: Target) -> tuple[str, ...]:
        redundant, asked = self.redundant(num_experts, target.cluster), target.cluster.num_redundant
        found, notes = read_map(self.path), []
        if redundant != asked:
            notes.append(f"{self.path} has {redundant} redundant experts per layer, and --redundant is {asked}")
        places, layers, number = self._places(found, target.layers), target.layers, len(found.rows)
        if found.rows_of == "all layers" and places == list(range(len(layers))) != list(range(number)):
            notes.append(
                f"{self.path}: rows 0 to {places[-1]} of {number} are taken, since the trace numbers its layers from "
                "0; if the first rows are dense layers, the trace needs the model's layer numbers"
            )
        elif found.rows_of == "all layers" and places != list(layers):
            notes.append(
                f"{self.path}: its {number} rows are taken as the layers {layers[0]} to {layers[-1]} of the trace, in "
                "order: they are too few to be all layers of the model"
            )
        return tuple(notes)

    def plan_for(self, history: torch.Tensor, target: Target) -> Placement:
        """history [S, L, E]: only its layers and experts are read; S may be 0."""
        num_experts, cluster = history.shape[-1], target.cluster
        found = read_map(self.path)
        if "version" in found.given:
            read_placement(self.path)  # raises where the file was changed by hand
        ranks = found.given.get("num_ranks", cluster.num_ranks)
        if ranks != cluster.num_ranks:
            raise ValueError(f"{self.path}: a map for {ranks} ranks, not {cluster.num_ranks}: give --ranks {ranks}")
        num_slots = num_experts + self.redundant(num_experts, cluster)
        # Devices of vLLM-Ascend with fewer experts than others have empty slots, which `check_full` refuses.
        least = -1 if found.holds_empty_slots or found.rows_of == "expert layers" else 0
        rows = [found.rows[place] for place in self._places(found, target.layers)]
        for layer, row in zip(target.layers, rows, strict=True):
            self._check_row(row, layer, num_slots, num_experts, least)
        slots = torch.tensor(rows, dtype=torch.int64, device=history.device)
        placement = Placement(slots, num_experts, cluster.num_ranks, cluster.num_nodes)
        if not found.holds_empty_slots:
            check_full(placement, target.layers, self.path)
        return placement

    def _places(self, found: ExpertMap, layers: Sequence[int]) -> list[int]:
        """The row of each of the trace's layers."""
        place = {layer: row for row, layer in enumerate(found.layers)}
        missing = [layer for layer in layers if layer not in place]
        if found.rows_of != "numbered" and len(layers) == len(found.rows):
            if missing or found.rows_of == "expert layers":
                return list(range(len(layers)))
        elif found.rows_of == "expert layers":
            raise ValueError(
                f"{self.path}: its {len(found.rows)} layers have no numbers of the model, and the trace has "
                f"{len(layers)}: give a trace of all layers with experts, or a map in another format"
            )
        if missing:
            raise ValueError(
                f"{self.path}: layer {missing[0]} of the trace is missing (the file has {len(found.rows)} layers, up "
                f"to {max(found.layers)}): give the map of the trace's model"
            )
        return [place[layer] for layer in layers]

    def _check_row(self, row: list[int], layer: int, num_slots: int, num_experts: int, least: int) -> None:
        where = f"{self.path}: layer {layer}"
        if len(row) != num_slots:
            raise ValueError(f"{where} has {len(row)} slots, other layers {num_slots}: give every layer as many")
        for slot, expert in enumerate(row):
            if not least <= expert < num_experts:
                raise ValueError(
                    f"{where}, slot {slot} holds expert {expert}, the trace has experts 0 to {num_experts - 1}: "
                    "correct the slot, or give the map of the trace's model"
                )
        if missing := sorted(set(range(num_experts)) - set(row)):
            raise ValueError(f"{where} has no slot for expert {missing[0]}: give every expert a slot")
