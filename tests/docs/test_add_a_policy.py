"""The worked example of docs/add-a-policy.md: its file, its line, its test and its command."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest
import torch

from epsim.cli.main import main
from epsim.placement.base import Cluster
from epsim.policies import registry
from tests.docs.blocks import ROOT, blocks, commands

PAGE = ROOT / "docs" / "add-a-policy.md"


def test_the_worked_example_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,), (test,) = (blocks(PAGE, f"python {kind}") for kind in ("file", "test"))
    path = tmp_path / "striped.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("striped", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "striped", module)
    spec.loader.exec_module(module)
    names = {"Striped": module.Striped, "torch": torch, "Cluster": Cluster}
    exec(test, names)
    names["test_neighbours_share_no_rank"]()
    monkeypatch.setattr(registry, "SHIPPED", (*registry.SHIPPED, module.Striped))
    registry.kinds.cache_clear()
    try:
        for line in commands(PAGE):
            monkeypatch.setattr(sys, "argv", shlex.split(line))
            with pytest.raises(SystemExit) as stop:
                main()
            assert stop.value.code == 0, capsys.readouterr().err
            assert "striped+lplb" in capsys.readouterr().out
    finally:
        registry.kinds.cache_clear()
