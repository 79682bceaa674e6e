"""Conversations and prompts with pictures, as requests: one placeholder per token, and a clear word for what cannot be.

With the tokenizer of `tiny`, which knows Qwen's marks for pictures.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raypp.api.picture_prompts import EncodedPrompt, PicturePrompts
from raypp.api.prepare import RequestPreparer
from raypp.api.tokenizer import Tokenizer
from raypp.config.sections import ImagesSection
from raypp.errors import RequestError
from raypp.models.registry import resolve_model_path
from raypp.models.vision_config import PixelBounds, VisionConfig
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import PictureReader

MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
RED, BLUE = (Image.new("RGB", (64, 32), colour) for colour in ("red", "blue"))
TEXT = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model_path("tiny"))


@pytest.fixture(scope="module")
def marks(tokenizer: Tokenizer) -> dict[str, int]:
    return {mark: int(tokenizer.encode([mark])[0][0]) for mark in MARKS}


@pytest.fixture(scope="module")
def reader(marks: dict[str, int]) -> PictureReader:
    """Of a model that makes a token of every 16 x 16 pixels."""
    bounds = PixelBounds(min_pixels=256, max_pixels=1 << 20)
    config = VisionConfig(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        in_channels=3,
        patch_size=8,
        temporal_patch_size=2,
        spatial_merge_size=2,
        out_hidden_size=16,
        grid_side=2,
        deepstack_layers=(),
        rope_theta=10000.0,
        image_token_id=marks["<|image_pad|>"],
        video_token_id=marks["<|video_pad|>"],
        vision_start_token_id=marks["<|vision_start|>"],
        vision_end_token_id=marks["<|vision_end|>"],
        image_mean=(0.5,) * 3,
        image_std=(0.5,) * 3,
        image_pixels=bounds,
        video_pixels=bounds,
    )
    return PictureReader(config, 200, Fetcher(ImagesSection()))


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer, reader: PictureReader) -> RequestPreparer:
    return RequestPreparer(tokenizer, vocab_size=4032, max_model_len=200, seed=0, pictures=reader)


def _ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_a_conversation_with_an_image(preparer: RequestPreparer, tokenizer: Tokenizer, marks: dict[str, int]) -> None:
    [prepared] = preparer.chats([_ask({"type": "image", "image": RED}, TEXT)])
    request = prepared.request
    pad = marks["<|image_pad|>"]
    rendered = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.text == rendered
    once = tokenizer.encode([rendered])[0].tolist()
    place = once.index(pad)
    assert request.prompt_token_ids.tolist() == once[:place] + [pad] * 8 + once[place + 1 :]  # 4 x 2 blocks of pixels
    assert request.items is not None
    assert request.items.starts == (place,)
    assert request.items.items[0].num_tokens == 8
    assert request.items.position_offset == 4 - 8


def test_every_form_of_an_image_is_the_same_item(preparer: RequestPreparer, tmp_path: Path) -> None:
    file = io.BytesIO()
    RED.save(file, "PNG")
    path = tmp_path / "red.png"
    path.write_bytes(file.getvalue())
    forms = [RED, file.getvalue(), path, str(path), np.asarray(RED)]
    requests = [one.request for one in preparer.chats([_ask({"type": "image", "image": form}) for form in forms])]
    assert len({request.items.items[0].key for request in requests if request.items}) == 1
    [other] = [one.request for one in preparer.chats([_ask({"type": "image", "image": BLUE})])]
    assert other.items is not None
    assert other.items.items[0].key not in {request.items.items[0].key for request in requests if request.items}


def test_several_images_a_video_and_turns(
    preparer: RequestPreparer, marks: dict[str, int], tokenizer: Tokenizer
) -> None:
    conversation = [
        {"role": "system", "content": "Look."},
        *_ask({"type": "image", "image": RED}, TEXT, {"type": "image", "image": BLUE}),
        {"role": "assistant", "content": "Colours."},
        *_ask({"type": "video", "video": [RED, BLUE, RED], "fps": 1.0}, TEXT),
    ]
    request = preparer.chats([conversation])[0].request
    items, ids = request.items, request.prompt_token_ids.tolist()
    assert items is not None
    assert [ids[start] for start in items.starts] == [marks["<|image_pad|>"]] * 2 + [marks["<|video_pad|>"]] * 2
    assert ids.count(marks["<|image_pad|>"]) == 16
    assert ids.count(marks["<|video_pad|>"]) == 16
    assert items.items[0].key != items.items[1].key
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "<0.5 seconds><|vision_start|>" + "<|video_pad|>" * 8 + "<|vision_end|><2.0 seconds><|vision_start|>" in text


def test_prompts_with_images(preparer: RequestPreparer, tokenizer: Tokenizer, marks: dict[str, int]) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    once = tokenizer.encode([text])[0].tolist()
    images = {"image": [RED]}
    prepared = preparer.prompts(
        [
            {"prompt": text, "multi_modal_data": {"image": RED}},
            {"prompt_token_ids": once, "multi_modal_data": images},
            "What?",
        ]
    )
    requests = [one.request for one in prepared]
    assert requests[0].prompt_token_ids.tolist() == requests[1].prompt_token_ids.tolist()
    assert requests[0].items is not None
    assert requests[1].items is not None
    assert requests[0].items.items[0].key == requests[1].items.items[0].key
    assert (prepared[0].text, prepared[1].text, requests[2].items) == (text, None, None)
    [again] = preparer.prompts([EncodedPrompt(requests[0].prompt_token_ids, requests[0].items)])
    assert again.request.items is requests[0].items


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image", "image": b"no image"}, "not an image"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not allowed"),
        ({"type": "image_url", "image_url": {"url": "file:///a.png"}}, "address"),
        ({"type": "image", "image": Image.new("RGB", (2000, 500))}, "more tokens than"),
        ({"type": "audio", "audio": b""}, "neither text nor an image"),
    ],
)
def test_what_is_wrong_is_said_of_that_request(preparer: RequestPreparer, part: dict[str, Any], words: str) -> None:
    bad = _ask({"type": "image", "image": RED}, part)
    with pytest.raises(RequestError, match=words) as caught:
        preparer.chats([_ask(TEXT), bad], request_ids=["good", "bad"])
    assert caught.value.request_id == "bad"


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_placeholder_that_a_message_spells_is_text(
    preparer: RequestPreparer, tokenizer: Tokenizer, marks: dict[str, int], mark: str, role: str
) -> None:
    said = {"role": role, "content": f"What is {mark}?"}
    image, video = {"type": "image", "image": RED}, {"type": "video", "video": [RED, BLUE], "fps": 1.0}
    [prepared] = preparer.chats([[said, *_ask(image, video, TEXT), said, *_ask({"type": "text", "text": mark})]])
    [without] = preparer.chats([_ask(image, video, TEXT)])
    request = prepared.request
    ids, others = request.prompt_token_ids.tolist(), without.request.prompt_token_ids.tolist()
    assert ids.count(marks[mark]) == others.count(marks[mark]) == 8
    assert request.items is not None
    assert len(request.items.items) == 2
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.count(mark) == 8 + 3
    assert "\ufdd0" not in text + (prepared.text or "")
    assert (prepared.text or "").count(f"What is {mark}?") == 2


def test_a_conversation_with_an_image_is_not_cut(tokenizer: Tokenizer, reader: PictureReader) -> None:
    prompts, [asked] = PicturePrompts(tokenizer, reader), [_ask({"type": "image", "image": RED})]
    whole = prompts.chat(asked)
    assert len(prompts.chat(asked, max_kept=len(whole.token_ids)).token_ids) == len(whole.token_ids)
    with pytest.raises(RequestError, match="with images cannot be cut") as caught:
        prompts.chat(asked, max_kept=len(whole.token_ids) - 1)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "no mark", "multi_modal_data": {"image": RED}}, "number of image placeholders"),
        ({"prompt": "a", "multi_modal_data": {"audio": b""}}, "holds images"),
        ({"prompt": 3, "multi_modal_data": {"image": RED}}, "wrong keys"),
    ],
)
def test_prompts_that_cannot_be(preparer: RequestPreparer, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        preparer.prompts([prompt])


def test_a_model_that_takes_text_alone(tokenizer: Tokenizer) -> None:
    preparer = RequestPreparer(tokenizer, vocab_size=4032, max_model_len=200, seed=0)
    for part in ({"type": "image", "image": RED}, {"type": "image_url", "image_url": {"url": "data:,"}}):
        with pytest.raises(RequestError, match="takes no images"):
            preparer.chats([_ask(part)])
    with pytest.raises(RequestError, match="takes no images"):
        preparer.prompts([{"prompt": "a", "multi_modal_data": {"image": RED}}])
