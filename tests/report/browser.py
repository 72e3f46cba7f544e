"""Headless Chromium with a report in it, or the reason why there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


def missing() -> str:
    """What the tests lack; "" for nothing."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program}: apt-get install chromium chromium-driver (make test does so as root)"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    """A selenium driver that keeps the console's messages and may reach no network."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def show(driver: Any, page: Path, width: int = 1280, dark: bool = False, height: int = 900) -> None:
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    driver.get(page.resolve().as_uri())


def screenshot(driver: Any, name: str, width: int) -> None:
    """Of the whole page, into the folder that EPSIM_SCREENSHOTS names."""
    folder = os.environ.get("EPSIM_SCREENSHOTS")
    if folder:
        height = min(driver.execute_script("return document.documentElement.scrollHeight"), 12_000)
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        Path(folder).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))
