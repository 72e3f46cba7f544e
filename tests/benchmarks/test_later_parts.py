"""Parts measured again later take the place of the earlier ones, with their own command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.scripts import script

later_parts: Any = script("later_parts")

ABOUT = {"device": "a GPU", "num_devices": 2, "torch": "2.11"}
FIRST = {"command": "all", **ABOUT, "parts": {"exchange": [1], "balance": [2], "phases": [3]}}


def test_later_parts_take_the_place_of_earlier_ones() -> None:
    once = later_parts.with_parts(FIRST, {"command": "some", **ABOUT, "parts": {"balance": [4], "phases": [5]}})
    assert once["parts"] == {"exchange": [1], "balance": [4], "phases": [5]}
    assert (once["command"], once["commands"]) == ("all", {"balance": "some", "phases": "some"})
    twice = later_parts.with_parts(once, {"command": "one", **ABOUT, "parts": {"phases": [6]}})
    assert twice["parts"] == {"exchange": [1], "balance": [4], "phases": [6]}
    assert later_parts.command_of(twice, "exchange") == "all"
    assert later_parts.command_of(twice, "exchange", "phases", "balance") == "all; one; some"
    assert later_parts.command_of(FIRST, "exchange", "balance") == "all"
    assert FIRST["parts"] == {"exchange": [1], "balance": [2], "phases": [3]}


def test_parts_of_another_machine_are_not_mixed() -> None:
    with pytest.raises(ValueError, match=r"measured on .*'num_devices': 8.* give another file"):
        later_parts.with_parts(FIRST, {"command": "some", **ABOUT, "num_devices": 8, "parts": {"balance": [4]}})
