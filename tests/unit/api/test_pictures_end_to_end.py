"""`tiny-vl` at the Python doors and in a batch job, and Qwen3.5 over HTTP, around a real engine in threads."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hf_vision import STATE_SEEDS, make_vision_checkpoint
from PIL import Image
from running_app import running_app

from raypp.api.async_llm import AsyncLLM
from raypp.api.llm import LLM
from raypp.batch_job.job import BatchJob
from raypp.batch_job.job_settings import JobSettings
from raypp.config.engine_config import EngineConfig
from raypp.errors import RequestError
from raypp.models.registry import resolve_model_path
from raypp.testing import launch_in_threads
from raypp.types import SamplingParams

DEMO = Path(__file__).parents[3] / "docs" / "images" / "shapes.png"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
TEXT = {"type": "text", "text": "What is in the picture?"}
ANSWER = "Two red circles and one blue square."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-vl", launch=launch_in_threads, num_stages=3, max_model_len=512) as llm:
        yield llm


def ask(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, TEXT]}]


def test_every_door_and_form_gives_the_same_answer(llm: LLM) -> None:
    image, data = Image.open(DEMO), DEMO.read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "image", "image": form} for form in (image, DEMO, str(DEMO), data)]
    parts.append({"type": "image_url", "image_url": {"url": url}})
    outputs = llm.chat([ask(part) for part in parts], GREEDY)
    assert [out.outputs[0].text for out in outputs] == [ANSWER] * len(parts)
    assert [out.metrics.num_cached_tokens > 0 for out in outputs].count(True) >= len(parts) - 1  # the same picture
    *_, last = llm.stream(ask(parts[0]), GREEDY)
    assert last.outputs[0].text == ANSWER
    prompt = outputs[0].prompt
    assert prompt is not None
    [generated] = llm.generate([{"prompt": prompt, "multi_modal_data": {"image": image}}], GREEDY)
    assert generated.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_pictures_beside_text_several_of_them_and_videos(llm: LLM) -> None:
    part = {"type": "image", "image": DEMO}
    hello = [{"role": "user", "content": "hello"}]
    [alone] = llm.chat(hello, GREEDY)
    mixed = llm.chat(
        [ask(part), hello, ask(part, part), ask({"type": "video", "video": [DEMO] * 3}), ask(part)], GREEDY
    )
    texts = [out.outputs[0].text for out in mixed]
    assert (texts[0], texts[1], texts[4]) == (ANSWER, alone.outputs[0].text, ANSWER)
    assert len(mixed[2].prompt_token_ids) > len(mixed[0].prompt_token_ids) + 20
    assert mixed[3].prompt is not None
    assert "<|video_pad|>" in mixed[3].prompt
    [several] = llm.chat(ask(part), SamplingParams(n=2, temperature=0.01, seed=1, max_tokens=32))
    assert [completion.text for completion in several.outputs] == [ANSWER] * 2


def test_a_picture_that_cannot_be_read_stops_nothing_else(llm: LLM) -> None:
    with pytest.raises(RequestError, match="not an image"):
        llm.chat(ask({"type": "image", "image": b"no image"}), GREEDY)
    assert llm.chat(ask({"type": "image", "image": DEMO}), GREEDY)[0].outputs[0].text == ANSWER


def test_async_and_batch(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(DEMO.read_bytes()).decode()}"
    good, bad = ({"type": "image_url", "image_url": {"url": u}} for u in (url, url[:200]))
    lines = [{"custom_id": name, "messages": ask(part), "temperature": 0} for name, part in (("a", good), ("b", bad))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = EngineConfig.from_flat("tiny-vl", max_model_len=512)

    async def run() -> list[str]:
        llm = await AsyncLLM.create(config, launch=launch_in_threads)
        async with llm:
            texts = [(await llm.complete_chat(ask(good), GREEDY)).outputs[0].text]
            texts += [out.outputs[0].text async for out in llm.chat(ask(good), GREEDY) if out.finished]
            with pytest.raises(RequestError, match="broken"):
                await anext(llm.chat(ask(bad), GREEDY))

            async def same(_: EngineConfig) -> AsyncLLM:
                return llm

            files = {"input_path": tmp_path / "in.jsonl", "output_path": tmp_path / "out.jsonl"}
            await BatchJob(JobSettings(config=config, **files), same).run()
        return texts

    assert asyncio.run(run()) == [ANSWER] * 2
    [completed], [failed] = (
        list(map(json.loads, (tmp_path / name).open())) for name in ("out.jsonl", "out.jsonl.errors.jsonl")
    )
    assert (completed["custom_id"], failed["custom_id"]) == ("a", "b")
    assert completed["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert failed["response"]["status_code"] == 400


def test_a_tower_beside_gated_delta_nets(tmp_path: Path) -> None:
    """Python, HTTP and a batch job give one text, which depends on the picture; without encoders it is refused."""
    path = make_vision_checkpoint(STATE_SEEDS[1], tmp_path / "vl", min_layers=3, like=resolve_model_path("tiny-vl"))
    blank = Image.new("RGB", (64, 48), "white")
    with LLM(str(path), launch=launch_in_threads, num_stages=3, max_model_len=512) as llm:
        picture, other = (
            llm.chat(ask({"type": "image", "image": image}), GREEDY)[0].outputs[0].text for image in (DEMO, blank)
        )
    assert picture != other
    url = f"data:image/png;base64,{base64.b64encode(DEMO.read_bytes()).decode()}"
    body = {"messages": ask({"type": "image_url", "image_url": {"url": url}}), "temperature": 0, "max_tokens": 32}
    with running_app(model=str(path), num_stages=2, max_model_len=512) as app, httpx.Client(base_url=app.url) as http:
        answer = http.post("/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == picture
    files = {"input_path": tmp_path / "in.jsonl", "output_path": tmp_path / "out.jsonl"}
    files["input_path"].write_text(json.dumps(body | {"custom_id": "a"}) + "\n")
    config = EngineConfig.from_flat(str(path), num_stages=2, max_model_len=512)

    async def run() -> None:
        async def create(config: EngineConfig) -> AsyncLLM:
            return await AsyncLLM.create(config, launch=launch_in_threads)

        await BatchJob(JobSettings(config=config, **files), create).run()

    asyncio.run(run())
    [completed] = map(json.loads, files["output_path"].open())
    assert completed["response"]["body"]["choices"][0]["message"]["content"] == picture
    with LLM(str(path), launch=launch_in_threads, num_encoders=0, max_model_len=512) as llm:
        with pytest.raises(RequestError, match="takes no images"):
            llm.chat(ask({"type": "image", "image": DEMO}), GREEDY)
        assert llm.chat(ask(), GREEDY)[0].outputs[0].token_ids
