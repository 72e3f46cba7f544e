"""The README's table of the time model's gates, from benchmarks/results/gates.json."""

from __future__ import annotations

from typing import Any

NAMES = {1: "1, per call", 2: "2, per layer", 3: "3, ranking", 4: "4, published"}


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def gates_table(found: dict[str, Any] | None) -> str:
    """Empty without results. Notes stand below, those of failed gates first."""
    if found is None:
        return ""
    lines = [
        f"Gates of the time model (`{found['command']}`, measured on {found['device']}; no number of the model "
        "was fitted to these figures; [docs/time.md](docs/time.md) says where its form was chosen in view of them):",
        "",
        "| gate | of | cases | figures | aim | |",
        "|---|---|---|---|---|---|",
    ]
    for gate in found["gates"]:
        figures = ", ".join(f"{name} {percent(value)}" for name, value in gate["figures"].items())
        holds = "holds" if gate["holds"] else "FAILS"
        lines.append(
            f"| {NAMES[gate['number']]} | {gate['what']} | {gate['cases']:,} | {figures} | {gate['aim']} | {holds} |"
        )
    notes: dict[str, list[str]] = {}
    for gate in sorted(found["gates"], key=lambda gate: gate["holds"]):
        if gate["note"]:
            notes.setdefault(gate["note"], []).append(gate["what"])
    failed = sum(not gate["holds"] for gate in found["gates"])
    lines += ["", f"{failed} of {len(found['gates'])} fail."]
    lines += [f"- {'; '.join(whose)}: {note}." for note, whose in notes.items()]
    return "\n".join(lines)
