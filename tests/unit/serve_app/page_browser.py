"""A browser for tests of the page. They are skipped where no Chromium is installed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)

needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None, reason=f"needs a Chromium: none of {', '.join(_NAMES)} is installed"
)
TIMEOUT_MS = 60_000


@contextlib.contextmanager
def launched_browser() -> Iterator[Any]:
    """Run a browser as long as the block runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=TIMEOUT_MS
        )
        yield browser
        browser.close()
