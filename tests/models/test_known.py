"""Names of models as people write them."""

from __future__ import annotations

import pytest

from epsim.models.known import find_model, unknown_model


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek_v3", "DeepSeek-V3"),
        ("Qwen1.5-MoE", "Qwen1.5-MoE-A2.7B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss", None),  # two begin so
        ("nosuch", None),
        ("", None),
    ],
)
def test_names(name: str, known: str | None) -> None:
    found = find_model(name)
    assert (found.name if found else None) == known
    assert bool(unknown_model(name)) == (known is None)
