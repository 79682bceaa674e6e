"""Take the images of the page that the README shows, light and dark, from a running server.

The pipeline and its load are real. The answer is scripted: the tiny model has no thoughts worth reading.

raypp serve tiny --num-stages 3 --port 8000 &
python tools/screenshot_page.py --url http://localhost:8000 --out docs/images
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import threading
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

_QUESTION = "When does functools.lru_cache help?"
_THOUGHTS = "They ask when, not how. Give the condition, then an example with numbers."
_ANSWER = """When a **pure** function is called again with the *same* arguments:

```python
from functools import lru_cache

@lru_cache(maxsize=128)
def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)
```

- The arguments must be hashable.
- The result used least recently goes first.

| `fib(30)` | times computed |
|---|--:|
| without the cache | 2,692,537 |
| with it | 31 |

See [the documentation](https://docs.python.org/3/library/functools.html#functools.lru_cache).
"""
_SCRIPT = """
const otherFetch = window.fetch;
window.fetch = (url, options) => {
  if (url !== "v1/chat/completions") return otherFetch(url, options);
  const start = async (controller) => {
    const send = (text) => controller.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
    let count = 0;
    for (const [field, text] of [["reasoning_content", THOUGHTS], ["content", ANSWER]]) {
      for (const piece of text.match(/\\s*\\S{1,6}/g)) {
        send(JSON.stringify({ choices: [{ delta: { [field]: piece }, finish_reason: null }] }));
        count++;
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
    }
    send(JSON.stringify({ choices: [], usage: { completion_tokens: count } }));
    send("[DONE]");
    controller.close();
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""
_NUM_OTHERS = 5


def main() -> None:
    """Open the page, let it answer beside other requests, and take its images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--out", default="docs/images", type=Path)
    args = parser.parse_args()
    stop = threading.Event()
    others = [threading.Thread(target=_keep_busy, args=(args.url, index, stop)) for index in range(_NUM_OTHERS)]
    for thread in others:
        thread.start()
    try:
        _take_images(args.url, args.out)
    finally:
        stop.set()
        for thread in others:
            thread.join()


def _keep_busy(url: str, index: int, stop: threading.Event) -> None:
    body = {"prompt": f"def f{index}(", "max_tokens": 150, "temperature": 1.0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=120) as client:
        while not stop.is_set():
            client.post("/v1/completions", json=body)


def _take_images(url: str, folder: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 780}, device_scale_factor=1.5)
        page.add_init_script(f"const THOUGHTS = {json.dumps(_THOUGHTS)}, ANSWER = {json.dumps(_ANSWER)};{_SCRIPT}")
        page.goto(url)
        page.locator("#health", has_text="ready").wait_for()
        page.click("[data-window='0.1']")
        page.wait_for_timeout(12_000)  # the history of tokens per second grows
        page.fill("#prompt", _QUESTION)
        page.press("#prompt", "Enter")
        page.locator(".message.assistant .note").wait_for(timeout=120_000)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(1_000)  # the canvases are drawn anew
            with Image.open(io.BytesIO(page.screenshot())) as image:
                small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
            small.save(folder / f"page-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
