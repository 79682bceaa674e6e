"""Take the picture of the page that the README shows, from a running server, while it answers.

raypp serve tiny --num-stages 3 --port 8000 &
python tools/screenshot_page.py --url http://localhost:8000 --out docs/images/page.png
"""

from __future__ import annotations

import argparse
import shutil
import threading

import httpx
from playwright.sync_api import sync_playwright

_QUESTION = "What does functools.lru_cache do?"
_NUM_OTHERS = 5


def main() -> None:
    """Open the page, let it answer beside other requests, and take its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--out", default="docs/images/page.png")
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    stop = threading.Event()
    others = [threading.Thread(target=_keep_busy, args=(args.url, index, stop)) for index in range(_NUM_OTHERS)]
    for thread in others:
        thread.start()
    try:
        _take_picture(args.url, args.out, "dark" if args.dark else "light")
    finally:
        stop.set()
        for thread in others:
            thread.join()


def _keep_busy(url: str, index: int, stop: threading.Event) -> None:
    body = {"prompt": f"def f{index}(", "max_tokens": 150, "temperature": 1.0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            client.post("/v1/completions", json=body)


def _take_picture(url: str, out: str, scheme: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 780}, device_scale_factor=1.5, color_scheme=scheme)
        page.goto(url)
        page.locator("#health", has_text="ready").wait_for()
        page.click("[data-window='0.1']")
        page.click("#settings summary")
        page.fill("#temperature", "0")
        page.click("#settings summary")
        page.fill("#prompt", _QUESTION)
        page.press("#prompt", "Enter")
        page.locator(".message.assistant .note").wait_for(timeout=120_000)
        page.wait_for_timeout(9_000)  # the history of tokens per second grows
        page.fill("#prompt", "And collections.deque?")
        page.press("#prompt", "Enter")
        page.wait_for_timeout(1_500)
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main()
