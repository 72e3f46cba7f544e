"""Reports in which some parts were measured later than the others."""

from typing import Any


def with_parts(before: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A report in which the parts of a later report replace the old ones. `commands` has the command of each such part.

    Raises ValueError if devices or versions differ.
    """
    own = ("command", "commands", "parts")
    first, second = ({key: value for key, value in one.items() if key not in own} for one in (before, later))
    if first != second:
        raise ValueError(f"measured on {second}, the report that is there on {first}: give another file")
    commands = before.get("commands", {}) | dict.fromkeys(later["parts"], later["command"]) | later.get("commands", {})
    return {"command": before["command"], "commands": commands, **first, "parts": before["parts"] | later["parts"]}


def command_of(report: dict[str, Any], *parts: str) -> str:
    """The command or commands that measured these parts."""
    commands = report.get("commands", {})
    return "; ".join(dict.fromkeys(commands.get(part, report["command"]) for part in parts))
