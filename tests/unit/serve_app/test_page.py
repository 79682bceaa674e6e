"""The page in a real browser, with a real engine: chat, stop, refusals, keys, and the live picture."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from page_browser import TIMEOUT_MS, launched_browser, needs_chromium
from running_app import RunningApp, running_app

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, app: RunningApp) -> Iterator[Any]:
    """The page, opened. At the end nothing may have come from elsewhere, and no script may have failed."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(TIMEOUT_MS)
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(app.url)
    expect(page.locator("#health")).to_have_text("ready", timeout=TIMEOUT_MS)
    yield page
    page.close()
    assert not errors
    assert all(url.startswith((app.url, "data:", "blob:")) for url in requested)


def say(page: Any, text: str) -> Any:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return page.locator(".message.assistant").last


def roles(page: Any) -> list[str]:
    """Return who says what in the conversation that the next request would send."""
    return page.evaluate("import('./page/chat.js').then(({ conversation }) => conversation().map((m) => m.role))")


def answer_shortly(route: Any) -> None:
    """Let an answer leave room for the next question, whatever it draws."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "max_tokens": 40}))


def test_a_restart_of_the_engine_is_shown(browser: Any) -> None:
    with running_app({"live_period_s": 0.05}, num_stages=1, heartbeat_s=0.05) as app:
        engine, may_start = app.context.llm._engine.handle, threading.Event()
        start_next = engine._supervisor._start_next
        engine._supervisor._start_next = lambda: (may_start.wait(60), start_next())[1]
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(app.url)
        expect(page.locator("#health")).to_have_text("ready", timeout=TIMEOUT_MS)
        expect(page.locator("#recoveries")).to_be_hidden()
        engine.kill_stage(0)
        expect(page.locator("#health")).to_have_text("engine restarts", timeout=TIMEOUT_MS)
        may_start.set()
        expect(page.locator("#health")).to_have_text("ready", timeout=TIMEOUT_MS)
        expect(page.locator("#recoveries")).to_contain_text("started again once", timeout=TIMEOUT_MS)
        expect(page.locator("#recoveries")).to_contain_text("stage 0 died")
        page.close()


def test_an_answer_streams_in_while_the_lanes_move(page: Any) -> None:
    page.route("**/v1/chat/completions", answer_shortly)
    expect(page.locator("#model")).to_have_text("tiny")
    page.click("[data-window='3']")
    answer = say(page, "def main(argv):")
    expect(answer.locator(".note")).to_contain_text("tokens in", timeout=TIMEOUT_MS)
    assert answer.text_content().strip()
    expect(page.locator("#lanes")).to_have_attribute("data-spans", re.compile(r"[1-9]"), timeout=TIMEOUT_MS)
    expect(page.locator("#legend span").first).to_contain_text("cohort", timeout=TIMEOUT_MS)
    assert page.evaluate("import('./page/live.js').then(({ live }) => live.stages)") == 2
    painted = page.evaluate(
        """() => {
            const canvas = document.getElementById("lanes");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return pixels.some((value) => value > 0);
        }"""
    )
    assert painted
    say(page, "and again")
    expect(page.locator(".message.assistant .note")).to_have_count(2, timeout=TIMEOUT_MS)
    assert roles(page) == ["user", "assistant", "user", "assistant"]
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_what_the_server_refuses_is_shown_and_left_out(page: Any) -> None:
    page.click("#settings summary")
    page.fill("#max-tokens", "0")
    answer = say(page, "What is this?")
    expect(answer).to_contain_text("max_tokens", timeout=TIMEOUT_MS)
    expect(answer).to_have_class(re.compile("failed"))
    assert roles(page) == ["user"]
    page.fill("#max-tokens", "4")
    page.click("text=Retry")
    expect(page.locator(".message.assistant .note")).to_contain_text("4 tokens in", timeout=TIMEOUT_MS)
    assert roles(page) == ["user", "assistant"]
    expect(page.locator("#attach")).to_be_hidden()  # the model takes none


@pytest.mark.full
def test_everything_can_be_seen_in_a_window_of_any_size(page: Any) -> None:
    is_cut = "(e) => e.scrollHeight > e.clientHeight && !['auto', 'scroll'].includes(getComputedStyle(e).overflowY)"
    is_on_top = """(element) => {
        const box = element.getBoundingClientRect();
        return element.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2));
    }"""
    for size in ((1280, 800), (901, 500), (900, 1200), (768, 1024), (390, 844), (320, 568), (844, 390)):
        page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        for parts in ("main", "section"):
            for part in page.locator(parts).all():
                assert part.bounding_box()["height"] > 150, (size, part.get_attribute("class"))
                assert not part.evaluate(is_cut), (size, part.get_attribute("class"))
        for name in ("#prompt", "#send", "#tokens-per-s", "#bubble", "[data-window='3']", "#lanes", "#history", ".bar"):
            part = page.locator(name)
            part.scroll_into_view_if_needed()
            expect(part).to_be_in_viewport(ratio=0.98)  # less by the fraction of a pixel that scrolling leaves
            assert part.evaluate(is_on_top), (size, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.full
def test_stop_ends_the_request(browser: Any) -> None:
    from raypp.testing import FakeStage

    with running_app(num_stages=1, stage_factory=FakeStage(step_ms=30)) as app:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(app.url)
        answer = say(page, "go on")
        expect(answer).not_to_have_text("", timeout=TIMEOUT_MS)
        assert app.stats()["num_running"] == 1
        page.click("#stop")
        expect(answer.locator(".note")).to_have_text("stopped", timeout=TIMEOUT_MS)
        app.wait_until(lambda: not app.stats()["num_running"], "the request is ended")
        page.close()


def test_a_key_is_asked_for_and_used(browser: Any) -> None:
    with running_app({"api_keys": ["sesame"]}, num_stages=1) as app:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(app.url)
        expect(page.locator("#health")).to_have_text("API key needed", timeout=TIMEOUT_MS)
        page.click("#settings summary")
        page.fill("#api-key", "sesame")
        page.press("#api-key", "Tab")
        expect(page.locator("#health")).to_have_text("ready", timeout=TIMEOUT_MS)
        page.click("#settings summary")
        answer = say(page, "def")
        expect(answer.locator(".note")).to_contain_text("tokens in", timeout=TIMEOUT_MS)
        page.close()
