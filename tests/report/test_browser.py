"""The page in a real browser: no errors, sorting, heat maps, widths, light and dark, print, keyboard, time to open."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epsim.placement.base import Cluster, Placement
from epsim.policies.load import Load
from epsim.policies.stack import parse_stack
from epsim.replaying import ReplayOptions, replay
from epsim.report.write import write_report
from epsim.results import ResultsData
from epsim.score.block import StackScore
from epsim.score.collect import ScoredStacks
from epsim.score.formulas import METRICS
from epsim.score.metrics import Values
from epsim.score.steps import seen_steps
from epsim.score.summary import StackSummary
from epsim.traces.importing import open_trace
from epsim.traces.options import ImportOptions
from epsim.traces.select import select_steps
from tests.report.browser import chromium, missing, screenshot, show

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
MAX_PAGE_BYTES = 6 * 2**20
MAX_OPEN_MS = 2000


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ResultsData]:
    folder = tmp_path_factory.mktemp("report")
    trace = select_steps(open_trace([Path("sample")], ImportOptions()), folder / "some.parquet", "decode", 64)
    stacks = ("contiguous", "eplb", "eplb+lplb", "eplb+lplb+waterfill")
    named = tuple(("" if number else HOSTILE, parse_stack(text)) for number, text in enumerate(stacks))
    results = replay(trace, ReplayOptions(Cluster(8, 2, 8), named), trace_name=HOSTILE)
    write_report(results, folder)
    return folder / "report.html", results


def complaints(driver: Any) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser")]


def requested(driver: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [address for address in sent if not address.startswith("data:")]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_error_no_request_no_overflow(driver: Any, page: tuple[Path, ResultsData], width: int, dark: bool) -> None:
    path, _ = page
    driver.get_log("browser")
    driver.get_log("performance")
    show(driver, path, width, dark)
    assert complaints(driver) == []
    assert requested(driver) == [path.resolve().as_uri()]
    assert driver.execute_script("return document.documentElement.scrollWidth") == width
    # Text stays text: a name that is markup makes no element and runs nothing.
    assert driver.execute_script("return document.querySelectorAll('img, iframe, object').length") == 0
    assert HOSTILE in driver.execute_script("return document.querySelector('table.stacks').innerText")
    lightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert (max(driver.execute_script(lightness)) < 60) == dark
    assert (min(driver.execute_script(lightness)) > 200) == (not dark)
    shown = "return [...document.querySelectorAll('figure svg')].filter((s) => s.getClientRects().length).length"
    figures = driver.execute_script("return document.querySelectorAll('figure').length")
    assert driver.execute_script(shown) == figures - 1  # one of two widths each; the heat maps are canvases
    screenshot(driver, f"report-{width}-{'dark' if dark else 'light'}", width)


def test_sorting(driver: Any, page: tuple[Path, ResultsData]) -> None:
    path, results = page
    show(driver, path)
    column = "return [...document.querySelectorAll('table.stacks tbody tr')].map((r) => r.cells[1].textContent)"
    wanted = [f"{entry['metrics']['max_over_mean']['mean']:.3f}" for entry in results["stacks"]]
    assert driver.execute_script(column) == wanted
    head = driver.find_elements("css selector", "table.stacks th button")[1]
    for order in ("ascending", "descending"):
        head.send_keys("\n")  # by keyboard
        assert driver.execute_script(column) == sorted(wanted, reverse=order == "descending")
        sort = "return document.querySelectorAll('table.stacks th')[1].getAttribute('aria-sort')"
        assert driver.execute_script(sort) == order


PIXELS = """
const canvas = document.querySelectorAll('.map canvas')[arguments[0]];
const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
return [canvas.width, canvas.height, [...image.data]];
"""


def wanted_pixels(values: Any, low: float, high: float) -> np.ndarray[Any, Any]:
    """values [stretches, ranks] -> [ranks, stretches, 3], by matplotlib's own colours."""
    import matplotlib as mpl

    share = (np.array(values, dtype=float).T - low) / (high - low)
    colours = mpl.colormaps["cividis"](np.minimum((share * 256).astype(int), 255))[..., :3]
    rounded: np.ndarray[Any, Any] = np.round(255 * colours)
    return rounded


def test_heat_maps_are_the_results(driver: Any, page: tuple[Path, ResultsData]) -> None:
    path, results = page
    show(driver, path)
    every = np.array([entry["load_over_mean_by_step"] for entry in results["stacks"]])
    for side, stack in (
        (0, 0),
        (1, int(np.argmin([e["metrics"]["max_over_mean"]["mean"] for e in results["stacks"]]))),
    ):
        width, height, data = driver.execute_script(PIXELS, side)
        assert (width, height) == every[stack].shape
        pixels = np.array(data).reshape(height, width, 4)
        assert (pixels[..., 3] == 255).all()
        assert np.abs(pixels[..., :3] - wanted_pixels(every[stack], every.min(), every.max())).max() <= 1
    shown = [driver.find_element("id", name).text for name in ("heat-low", "heat-high")]
    assert shown == [f"{every.min():.2f}", f"{every.max():.2f}"]
    canvas = driver.find_elements("css selector", ".map canvas")[0]
    canvas.send_keys("\ue014\ue014\ue015")  # right, right, down
    said = driver.find_elements("css selector", ".map output")[0].text
    assert said == f"step 2, rank 1: {every[0][2][1]:.3f} x the mean load"
    # one layer alone
    driver.execute_script(
        "const s = document.getElementById('heat-layer'); s.value = '1'; s.dispatchEvent(new Event('change'))"
    )
    layers = np.array([entry["load_over_mean_by_layer"][1] for entry in results["stacks"]], dtype=float)
    width, height, data = driver.execute_script(PIXELS, 0)
    pixels = np.array(data).reshape(height, width, 4)[..., :3]
    assert np.abs(pixels - wanted_pixels(layers[0], layers.min(), layers.max())).max() <= 1


def test_everything_is_reachable_by_keyboard(driver: Any, page: tuple[Path, ResultsData]) -> None:
    show(driver, page[0])
    from selenium.webdriver.common.keys import Keys

    wanted = driver.execute_script("return document.querySelectorAll('a, button, select, .map canvas, .scroll').length")
    reached = set()
    for _ in range(wanted + 40):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(driver.execute_script(
            "const e = document.activeElement;"
            "return [...document.querySelectorAll('a, button, select, .map canvas, .scroll')].indexOf(e)"
        ))  # fmt: skip
    assert len(reached - {-1}) == wanted


def test_print(driver: Any, page: tuple[Path, ResultsData]) -> None:
    show(driver, page[0], dark=True)
    printed = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert printed.startswith(b"%PDF")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert driver.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert driver.execute_script("return getComputedStyle(document.body).color") == "rgb(0, 0, 0)"


def large_results() -> ResultsData:
    """2,000 steps x 61 layers x 16 ranks of two stacks, as a replay would gather them."""
    rng = np.random.default_rng(0)
    num_steps, num_layers, num_ranks, num_experts = 2000, 61, 16, 64
    summaries = [StackSummary("", parse_stack(text), (), num_steps) for text in ("contiguous", "eplb+lplb")]
    collected = ScoredStacks(summaries, 0)
    for first in range(0, num_steps, 250):
        total = torch.from_numpy(rng.gamma(9.0, 30.0, (250, num_layers, num_ranks)))
        tokens = torch.full((250, num_layers), float(64 << first // 500))
        counts = rng.integers(0, 99, (250, num_layers, num_experts))
        seen = seen_steps(counts, counts.sum(2))
        scores = []
        for number in range(2):
            load = total if number == 0 else total.mean(-1, keepdim=True) + total * 0.2
            ratio = load.amax(-1) / load.mean(-1)
            metrics: dict[str, Values] = dict.fromkeys(METRICS, "not here")
            metrics |= {"max_over_mean": ratio, "optimality_gap": ratio - 1}
            none, whole = torch.zeros_like(load), tokens.long()
            work = Load(load, load, none, none, tokens, whole, none.long(), rounded=False)
            scores.append(StackScore(work, none[..., 0], metrics))
        collected.add(scores, seen)
    slots = torch.arange(num_experts).expand(num_layers, -1)
    gathered = collected.results([Placement(slots, num_experts, num_ranks, 1)] * 2)
    trace = {
        "name": "large", "level": "counts", "origin": "drawn", "model": "m", "phase": "decode", "top_k": 8,
        "num_layers": num_layers, "num_experts": num_experts, "steps_planned": 0, "steps_scored": num_steps,
    }  # fmt: skip
    setting = {
        "ranks": num_ranks, "nodes": 1, "redundant": 0, "groups": 1, "seed": 0, "shared_cost": 0.0, "history": "none",
        "version": "0", "command": "none",
    }  # fmt: skip
    return {"schema": 1, "kind": "replay", "trace": trace, "setting": setting, **gathered, "verdict": "large"}


def test_a_large_page_opens_at_once(driver: Any, tmp_path: Path) -> None:
    results = large_results()
    write_report(results, tmp_path)
    path = tmp_path / "report.html"
    assert path.stat().st_size < MAX_PAGE_BYTES
    assert (tmp_path / "results.json").stat().st_size < MAX_PAGE_BYTES
    driver.get_log("browser")
    took = []
    for _ in range(3):  # the machine may be busy
        show(driver, path)
        took.append(driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(took) < MAX_OPEN_MS
    assert complaints(driver) == []
    assert driver.execute_script("return document.querySelectorAll('#heat-layer option').length") == 62
    screenshot(driver, "report-large", 1280)
