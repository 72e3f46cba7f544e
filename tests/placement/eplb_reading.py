"""A plain-loop reading of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), ties sorted stably; run by path, not imported.

float32 throughout, in the published order of operations. It may put an expert twice on a rank, as upstream does.
"""

from __future__ import annotations

import numpy as np
import torch


def balanced(weight: list[np.float32], num_packs: int) -> list[list[int]]:
    """Items of each pack: heaviest first, onto the lightest pack with room; one item a pack stays in order."""
    room = len(weight) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = [np.float32(0)] * num_packs
    for item in sorted(range(len(weight)), key=lambda i: -weight[i]):
        open_packs = [p for p in range(num_packs) if len(packs[p]) < room]
        lightest = min(open_packs, key=lambda p: loads[p])
        packs[lightest].append(item)
        loads[lightest] = loads[lightest] + weight[item]
    return packs


def replicated(weight: list[np.float32], num_slots: int) -> tuple[list[int], list[int], list[int]]:
    """Expert and copy number of each slot, copies of each expert: further ones go where weight / copies is largest."""
    experts, numbers, copies = list(range(len(weight))), [0] * len(weight), [1] * len(weight)
    for _ in range(len(weight), num_slots):
        shares = [w / np.float32(c) for w, c in zip(weight, copies)]
        expert = int(np.argmax(shares))
        experts.append(expert)
        numbers.append(copies[expert])
        copies[expert] += 1
    return experts, numbers, copies


def rebalance(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [L, E] -> phy2log [L, P], log2phy [L, E, most copies], logcnt [L, E]."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_layers, num_experts = weight.shape
    assert num_gpus % num_nodes == 0
    assert num_replicas % num_gpus == 0
    group_size = num_experts // num_groups
    group_sums = weight.float().view(num_layers, num_groups, group_size).sum(-1).numpy()
    rows = weight.float().numpy()
    all_slots, all_numbers = [], []
    for layer in range(num_layers):
        slots: list[int] = []
        numbers: list[int] = []
        for groups in balanced(list(group_sums[layer]), num_nodes):
            experts = [group * group_size + i for group in groups for i in range(group_size)]
            node_weight = [rows[layer][e] for e in experts]
            local, number, copies = replicated(node_weight, num_replicas // num_nodes)
            shares = [node_weight[e] / np.float32(copies[e]) for e in local]
            for pack in balanced(shares, num_gpus // num_nodes):
                slots += [experts[local[i]] for i in pack]
                numbers += [number[i] for i in pack]
        all_slots.append(slots)
        all_numbers.append(numbers)
    phy2log = torch.tensor(all_slots)
    logcnt = torch.stack([row.bincount(minlength=num_experts) for row in phy2log])
    log2phy = torch.full((num_layers, num_experts, int(logcnt.max())), -1)
    for layer in range(num_layers):
        for slot, key in enumerate(zip(all_slots[layer], all_numbers[layer])):
            log2phy[layer, key[0], key[1]] = slot
    return phy2log, log2phy, logcnt
