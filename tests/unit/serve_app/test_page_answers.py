"""What the page makes of answers, in a real browser; the answers are scripted."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from page_browser import TIMEOUT_MS, launched_browser, needs_chromium
from starlette.testclient import TestClient

from serve_app.routes.status import page_routes
from serve_app.runner import AppContext

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

pytestmark = needs_chromium

ORIGIN = "http://localhost:9"  # nothing listens there: every request is answered below
MODEL = {"id": "an-organization/a-model-with-a-long-name-30B-A3B", "takes_images": True}

# A chat request is answered with what a test tells: told(delta) sends a chunk, ended() the end.
SCRIPT = """
window.scripted = { bodies: [], numAborted: 0, alerts: 0 };
window.alert = () => scripted.alerts++;
const otherFetch = window.fetch;
window.fetch = (url, options) => {
  if (url !== "v1/chat/completions") return otherFetch(url, options);
  scripted.bodies.push(JSON.parse(options.body));
  const start = (controller) => {
    const send = (text) => controller.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
    window.told = (delta) => send(JSON.stringify({ choices: [{ delta, finish_reason: null }] }));
    window.ended = () => {
      send(JSON.stringify({ choices: [], usage: { completion_tokens: 7 } }));
      send("[DONE]");
      controller.close();
    };
    options.signal.addEventListener("abort", () => {
      scripted.numAborted++;
      controller.error(options.signal.reason);
    });
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """The page, opened once, with what the server's own routes send. Nothing may come from elsewhere or fail."""
    app = FastAPI()
    app.include_router(page_routes(cast("AppContext", None)))
    client = TestClient(app, base_url=ORIGIN)
    elsewhere: list[str] = []
    errors: list[str] = []

    def answer(route: Any) -> None:
        url = route.request.url
        if url.endswith("/v1/models"):
            route.fulfill(json={"data": [MODEL]})
        elif url.endswith("/live"):
            route.fulfill(status=503)
        elif url.startswith(ORIGIN):
            response = client.get(url.removeprefix(ORIGIN))
            route.fulfill(status=response.status_code, headers=dict(response.headers), body=response.content)
        else:
            elsewhere.append(url)
            route.abort()

    with launched_browser() as browser:
        context = browser.new_context(
            viewport={"width": 1280, "height": 800}, permissions=["clipboard-read", "clipboard-write"]
        )
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Security" in message.text else None)
        page.add_init_script(SCRIPT)
        page.route("**/*", answer)
        page.goto(ORIGIN)
        expect(page.locator("#health")).to_have_text("ready")
        yield page
        assert (elsewhere, errors) == ([], [])


@pytest.fixture
def page(opened: Any) -> Any:
    """The page with a new chat."""
    opened.click("#clear")
    opened.evaluate("scripted.bodies = []; scripted.numAborted = 0")
    return opened


def ask(page: Any, text: str = "a question") -> Any:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_function("scripted.bodies.length")
    return page.locator(".message.assistant").last


def tell(page: Any, text: str, **delta: Any) -> None:
    page.evaluate("(delta) => told(delta)", {"content": text, **delta})


def answered(page: Any, text: str, **delta: Any) -> Any:
    answer = ask(page)
    tell(page, text, **delta)
    page.evaluate("ended()")
    expect(answer.locator(".note")).to_contain_text("7 tokens in")
    return answer


def outline(page: Any, markdown: str, step: int) -> str:
    """Return the elements and texts that Markdown becomes, when so many characters of it come at once."""
    return cast(
        "str",
        page.evaluate(
            """async ([markdown, step]) => {
              const { MarkdownView } = await import("./page/markdown.js");
              const root = document.createElement("div");
              const view = new MarkdownView(root);
              for (let at = 0; at < markdown.length; at += step) view.append(markdown.slice(at, at + step));
              view.finish();
              for (const head of root.querySelectorAll(".code-head")) head.remove();
              const show = (node) => node.nodeType === 3 ? node.data :
                `<${node.localName}>${[...node.childNodes].map(show).join("")}</>`;
              return [...root.childNodes].map(show).join("");
            }""",
            [markdown, step],
        ),
    )


MARKDOWN = {
    "Some **bold**, *slanted* and `co*de`,\nsnake_case, 2 * 3, a ** b, **no end": (
        "<p>Some <strong>bold</>, <em>slanted</> and <code>co*de</>,\nsnake_case, 2 * 3, a ** b, **no end</>"
    ),
    "# Title\ntext\n\n- a\n  - **b**\n\n    more\n- c\n---\n1. one\n  - in it\n2. two": (
        "<h3>Title</><p>text</><ul><li><p>a</><ul><li><p><strong>b</></><p>more</></></></><li><p>c</></></><hr></>"
        "<ol><li><p>one</><ul><li><p>in it</></></></><li><p>two</></></>"
    ),
    "1. see\n   ```python\n   if x:\n       y\n\n   # z\n   ```\n2. then": (
        "<ol><li><p>see</><div><pre><code>if x:\n    y\n\n# z</></></></><li><p>then</></></>"
    ),
    "> said\n> - this\n\n| a | `b` |\n|---|:-:|\n| 1 \\| 2 | *3* |\n\nend": (
        "<blockquote><p>said</><ul><li><p>this</></></></><div><table><thead><tr><th>a</><th><code>b</></></></>"
        "<tbody><tr><td>1 | 2</><td><em>3</></></></></></><p>end</>"
    ),
    "[a](https://e.org/x_(y)) <https://e.org/b> https://e.org/c.": (
        "<p><a>a</> <a>https://e.org/b</> <a>https://e.org/c</>.</>"
    ),
    "def f(*args, **kwargs):\n    return 1\n```\nnever closed": (
        "<p>def f(*args, **kwargs):\n    return 1</><div><pre><code>never closed</></></>"
    ),
}


@pytest.mark.parametrize("markdown", MARKDOWN, ids=range(len(MARKDOWN)))
def test_markdown_becomes_elements_however_it_is_cut(page: Any, markdown: str) -> None:
    for step in (1, 7, 1000):
        assert outline(page, markdown, step) == MARKDOWN[markdown]


HOSTILE = """<script>alert(1)</script> <img src=x onerror=alert(1)> <a href="javascript:alert(1)">x</a>

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>)
[d](/health) [e](//e.org)
![pixel](https://evil.example/?secret) ![data](data:image/svg+xml,x) <javascript:alert(1)> [f](java\tscript:alert(1))

<svg onload=alert(1)> &lt;iframe srcdoc='<script>alert(1)</script>'> | <b>
|---|---|
```html"><img src=x onerror=alert(1)>
</code></pre><script>alert(1)</script>
```
"""


def test_hostile_markdown_does_nothing(page: Any) -> None:
    answer = answered(page, HOSTILE, reasoning_content=HOSTILE)
    for tag in ("script", "img", "a", "svg", "iframe", "b", "style"):
        assert answer.locator(tag).count() == 0, tag
    text = answer.text_content()
    assert text.count("<script>alert(1)</script>") == 8  # all of it is there to be read
    assert "[a](javascript:alert(1))" in text
    assert "![pixel](https://evil.example/?secret)" in text
    assert page.evaluate("scripted.alerts") == 0
    refused = "() => { try { document.createElement('p').innerHTML = '<b>'; return false } catch { return true } }"
    assert page.evaluate(refused)  # the browser itself lets no text become markup here


def test_links_lead_to_other_pages_that_learn_nothing(page: Any) -> None:
    link = answered(page, "[**docs**](https://e.org/docs)").locator("a")
    assert link.get_attribute("href") == "https://e.org/docs"
    assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer", "_blank")


def test_thoughts_show_while_they_stream_and_fold_when_the_answer_begins(page: Any) -> None:
    answer = ask(page)
    tell(page, "", reasoning_content="Let me **see**.")
    thoughts = answer.locator("details.thoughts")
    expect(thoughts.locator("strong")).to_be_visible()
    expect(thoughts.locator("summary")).to_have_text("Thinking")
    assert page.get_attribute("#messages", "aria-busy") == "true"
    tell(page, "It is *four*.")
    expect(answer.locator("em")).to_be_visible()
    expect(thoughts.locator("strong")).to_be_hidden()
    expect(thoughts.locator("summary")).to_contain_text("Thoughts")
    thoughts.locator("summary").press("Enter")
    expect(thoughts.locator("strong")).to_be_visible()
    page.evaluate("ended()")
    expect(answer.locator(".note")).to_contain_text("7 tokens")
    expect(thoughts.locator("strong")).to_be_visible()  # the reader has opened them
    assert page.get_attribute("#messages", "aria-busy") == "false"


def test_what_has_been_shown_stays_while_more_streams_in(page: Any) -> None:
    """No element of a block that is over is made anew; marks that are not closed yet do not flash up."""
    answer = ask(page)
    tell(page, "First **paragraph**.\n\n```\nx = 1\n")
    expect(answer.locator("pre")).to_be_visible()
    page.evaluate("window.kept = [...document.querySelectorAll('.message.assistant :is(strong, pre)')]")
    tell(page, "y = 2\n```\nSome **bold te")
    expect(answer.locator("p strong").last).to_have_text("bold te")
    assert page.evaluate("kept.length === 2 && kept.every((element) => element.isConnected)")
    assert answer.locator("pre").text_content() == "x = 1\ny = 2"
    page.press("#prompt", "Escape")
    expect(answer.locator("p").last).to_have_text("Some **bold te")


@pytest.mark.parametrize("piece", ["word **bold** ", "- item\n", "*a _b `c [d]("])
def test_time_grows_with_the_length_of_the_answer_only(page: Any, piece: str) -> None:
    """Four times the text takes about four times as long, not sixteen times."""
    times = page.evaluate(
        """async (piece) => {
          const { MarkdownView } = await import("./page/markdown.js");
          const time = (length) => {
            const view = new MarkdownView(document.createElement("div"));
            const text = piece.repeat(length / piece.length);
            const started = performance.now();
            for (let at = 0; at < length; at += 20) view.append(text.slice(at, at + 20));
            view.finish();
            return performance.now() - started;
          };
          time(5000);
          return [Math.min(time(10000), time(10000)), Math.min(time(40000), time(40000))];
        }""",
        piece,
    )
    assert times[1] < 9 * times[0] + 300, times


def test_tool_calls_are_shown_folded_and_sent_back(page: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    page.click("#settings summary")
    page.fill("#tools", json.dumps(tools))
    page.click("#settings summary")
    answer = ask(page)
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
    tell(page, "I look.", tool_calls=[first])
    for piece in ('{"city": ', '"<b>Bern</b>"}'):
        tell(page, "", tool_calls=[{"index": 0, "function": {"arguments": piece}}])
    page.evaluate("ended()")
    call = answer.locator("details.call")
    expect(call.locator("summary")).to_have_text("Tool call look_up")
    expect(call.locator("pre")).to_be_hidden()
    call.locator("summary").click()
    expect(call.locator("pre")).to_have_text('{"city": "<b>Bern</b>"}')
    expect(answer.locator(".note")).to_contain_text("7 tokens")
    ask(page, "and now?")
    page.press("#prompt", "Escape")
    bodies = page.evaluate("scripted.bodies")
    assert [body["tools"] for body in bodies] == [tools, tools]
    arguments = {"name": "look_up", "arguments": '{"city": "<b>Bern</b>"}'}
    calls = [{"id": "call_1", "type": "function", "function": arguments}]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "I look.", "tool_calls": calls}
    page.evaluate("document.getElementById('tools').value = 'x'")
    expect(ask(page).locator(".note")).to_contain_text("Tools is no JSON")
    page.evaluate("document.getElementById('tools').value = ''")


def test_stop_and_retry(page: Any) -> None:
    answer = ask(page)
    tell(page, "Half an ans")
    expect(answer.locator("p")).to_have_text("Half an ans")
    page.focus("#stop")
    page.keyboard.press("Escape")
    expect(answer.locator(".note")).to_have_text("stopped")
    assert page.evaluate("scripted.numAborted") == 1
    expect(page.locator("#prompt")).to_be_focused()  # the button that had the focus is gone
    answer.locator("text=Retry").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("scripted.bodies.length === 2")
    expect(page.locator("#stop")).to_be_visible()
    tell(page, "Whole answer")
    page.evaluate("ended()")
    expect(answer.locator(".note")).to_contain_text("7 tokens")
    assert page.locator(".message.assistant").count() == 1
    first, second = page.evaluate("scripted.bodies")
    assert first["messages"] == second["messages"] == [{"role": "user", "content": "a question"}]
    ask(page, "next")
    page.wait_for_function("scripted.bodies.length === 3")
    page.click("#stop")
    expect(page.locator(".message.assistant .note").last).to_have_text("stopped")
    assert page.evaluate("scripted.bodies[2].messages.map((m) => m.content)") == ["a question", "Whole answer", "next"]
    assert page.locator("text=Retry").locator("visible=true").count() == 1  # of the last answer only


def test_answers_and_code_are_copied(page: Any) -> None:
    text = "Try **this**:\n\n```python\nprint('<b>')\n```\nor not."
    answer = answered(page, text)
    clipboard = "navigator.clipboard.readText()"
    answer.locator(".code .copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate(clipboard) == "print('<b>')"
    answer.get_by_role("button", name="Copy the answer").click()
    page.wait_for_function(f"{clipboard}.then((text) => text.startsWith('Try **this**'))")
    assert page.evaluate(clipboard) == text
    # Over plain HTTP from another machine there is no navigator.clipboard.
    page.evaluate("window.clipboard = navigator.clipboard")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    answer.locator(".code .copy").click()
    page.wait_for_function("clipboard.readText().then((text) => text === \"print('<b>')\")")
    page.evaluate("delete navigator.clipboard")


SHAPES = Path(__file__).parents[3] / "docs/images/shapes.png"


def test_images_are_attached_by_button_paste_and_drop_and_sent_in_the_message(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(SHAPES.read_bytes()).decode()}"
    page.set_input_files("#images", SHAPES)
    expect(page.locator("#attachments img")).to_have_count(1)
    give = """([event, target, field, url]) => {
      const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
      const data = new DataTransfer();
      data.items.add(new File([bytes], "shapes.png", { type: "image/png" }));
      const options = { [field]: data, bubbles: true, cancelable: true };
      const made = event === "paste" ? new ClipboardEvent(event, options) : new DragEvent(event, options);
      return !document.querySelector(target).dispatchEvent(made);
    }"""
    page.evaluate(give, ["paste", "#prompt", "clipboardData", url])
    expect(page.locator("#attachments img")).to_have_count(2)
    assert page.evaluate(give, ["drop", ".pipeline", "dataTransfer", url])  # the browser does not open the file
    expect(page.locator("#attachments img")).to_have_count(3)
    page.get_by_label("Remove image 3").press("Enter")
    expect(page.locator("#attachments img")).to_have_count(2)
    ask(page, "What is this?")
    page.press("#prompt", "Escape")
    expect(page.locator("#attachments")).to_be_hidden()
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, image, {"type": "text", "text": "What is this?"}]
    assert page.evaluate("scripted.bodies[0].messages") == [{"role": "user", "content": content}]
    assert page.locator(".message.user img").evaluate_all("(all) => all.map((image) => image.naturalWidth > 0)") == [
        True,
        True,
    ]
    monkeypatch.setitem(MODEL, "takes_images", False)  # the page asks again and again, while /live has nothing
    page.evaluate("import('./page/model.js').then(({ showModel }) => showModel())")
    expect(page.locator("#attach")).to_be_hidden()
    page.evaluate(give, ["paste", "#prompt", "clipboardData", url])
    expect(page.locator("#attach-note")).to_have_text("This model takes no images.")
    expect(page.locator("#attachments")).to_be_hidden()
    monkeypatch.undo()
    page.evaluate("import('./page/model.js').then(({ showModel }) => showModel())")
    expect(page.locator("#attach")).to_be_visible()


WIDE = "# A heading\n\n| a | b | c |\n|-|-|-|\n| unbreakable_word_in_a_cell | yyyyyyyyyyyyyyy | zzzzzzzzzzzz |\n"
WIDE += "\n```\n" + "a_long_line = " * 20 + "\n```\n" + "long" * 60 + " https://e.org/" + "x" * 200 + "\n\n- item\n"


def test_it_fits_360_pixels(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    answered(page, WIDE, reasoning_content="hm")
    page.click("#settings summary")
    outside = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((element) => {
          const { left, right, width } = element.getBoundingClientRect();
          return width && (left < 0 || right > 360.5) && !element.closest(".table, pre, .unseen");
        }).map((element) => element.id || element.className || element.localName)"""
    )
    page.click("#settings summary")
    assert outside == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, summary")].filter((element) => {
          const { width, height } = element.getBoundingClientRect();
          return width && (width < 24 || height < 24);
        }).map((element) => `${element.textContent} ${element.getBoundingClientRect().height}`)"""
    )
    assert small == []
    page.set_viewport_size({"width": 1280, "height": 800})


def test_it_works_by_keyboard_alone(page: Any) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_function("scripted.bodies.length")
    assert page.evaluate("scripted.bodies[0].messages[0].content") == "one\ntwo"
    tell(page, "```\ncode\n```", reasoning_content="hm")
    page.evaluate("ended()")
    expect(page.locator(".note")).to_contain_text("7 tokens")
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.focus("#settings summary")
    seen = []
    for _ in range(13):
        seen.append(
            page.evaluate(
                """() => {
                  const element = document.activeElement;
                  const outlined = element.closest(".attach") ?? element;
                  const name = element.ariaLabel || element.textContent.trim() || element.id;
                  return [name, getComputedStyle(outlined).outlineStyle !== "none"];
                }"""
            )
        )
        page.keyboard.press("Tab")
    names = [name for name, _ in seen]
    names[2] = re.sub(r", .*", "", names[2])
    assert names == [
        "Settings",
        "Conversation",
        "Thoughts",
        "Copy the code",
        "Copy the answer",
        "Retry",
        "Message",
        "Attach images",
        "New chat",
        "Send",
        "100 ms",
        "500 ms",
        "3 s",
    ]
    assert all(is_visible for _, is_visible in seen), seen


CONTRASTS = """
() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const found = channels(getComputedStyle(element).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found.slice(0, 3);
    }
  };
  const ratio = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const isShown = element.checkVisibility() && !element.closest("svg, canvas");
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!isShown || !(hasText || element.placeholder)) continue;
    const colours = hasText ? [getComputedStyle(element).color] : [getComputedStyle(element, "::placeholder").color];
    for (const colour of colours) {
      const found = ratio(channels(colour).slice(0, 3), behind(element));
      if (found < 4.5) low.push(`${element.id || element.className || element.localName}: ${found.toFixed(2)}`);
    }
  }
  return low;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_that_of_wcag_aa(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    text = "# T\n[a](https://e.org) `c`\n\n> q\n\n```py\nx\n```\n\n|a|b|\n|-|-|\n|1|2|\n"
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
    answer = answered(page, text, reasoning_content="hm", tool_calls=[call])
    answer.locator("details").evaluate_all("(all) => all.forEach((details) => (details.open = true))")
    page.click("#settings summary")
    low = page.evaluate(CONTRASTS)
    page.click("#settings summary")
    page.emulate_media(color_scheme=None)
    assert low == []
