"""Skipped tests fail a session where every test should run."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import pytest

    def test_passes():
        pass

    def test_needs():
        pytest.skip("needs {0}")

    @pytest.mark.skipif(True, reason="needs a GPU")
    def test_gpu():
        pass

    @pytest.mark.xfail
    def test_expected():
        assert False
"""
RECORDINGS = "recordings that are not part of the repository"


@pytest.mark.parametrize(
    ("variable", "value", "code", "workers"),
    [("CI", "true", 1, ()), ("EPSIM_NO_SKIPS", "1", 1, ("-n", "2")), ("CI", "", 0, ()), ("EPSIM_NO_SKIPS", "0", 0, ())],
)
def test_a_skip_fails_the_session(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    code: int,
    workers: tuple[str, ...],
) -> None:
    for name in ("CI", "EPSIM_NO_SKIPS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    pytester.makepyfile(TESTS.format("g++"), test_module="import pytest\npytest.importorskip('no_such_module')")
    done = pytester.runpytest_inprocess("-p", "tests.skips", *workers)
    assert done.ret == code
    done.assert_outcomes(passed=1, skipped=3, xfailed=1)
    lines = [line for line in done.outlines if line.startswith("test_")]
    told = [line for line in lines if ": needs g++" in line or ": could not import 'no_such_module'" in line]
    assert len(told) == (2 if code else 0)
    assert not any("a GPU" in line for line in lines)


def test_what_needs_recordings_or_a_gpu_may_be_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    pytester.makepyfile(TESTS.format(RECORDINGS))
    done = pytester.runpytest_inprocess("-p", "tests.skips")
    assert done.ret == 0
    done.assert_outcomes(passed=1, skipped=2, xfailed=1)
