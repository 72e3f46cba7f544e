"""Links lead somewhere, and pages name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
    for target in re.findall(r"\]\(([^)\s]*#[^)]*)\)", text):
        page, anchor = target.split("#")
        inside = (path.parent / page if page else path).read_text(encoding="utf-8")
        heads = {
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", inside, re.M)
        }
        assert anchor in heads, target


def test_citation_and_hooks_are_yaml() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [hook["id"] for hook in hooks["repos"][0]["hooks"]] == ["ruff", "ruff-format", "mypy"]
