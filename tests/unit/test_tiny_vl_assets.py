"""The embedded vision model: its size, that it says what is in pictures, and that transformers reads it alike.

`TINY_VL_PICTURES=200` scores as docs/tiny-vl.md does; CI takes the first of the same pictures.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_pictures import DESCRIBE, read_caption
from train_tiny_vl import describe_pictures, score_pictures
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

REPOSITORY = Path(__file__).parents[2]
TINY_VL = REPOSITORY / "raypp" / "assets" / "tiny-vl"
DEMO = REPOSITORY / "docs" / "images" / "shapes.png"
NUM_PICTURES = int(os.environ.get("TINY_VL_PICTURES", "40"))
LEAST_EXACT = {"up to six things": 0.9, "up to nine things": 0.8, "pairs never trained": 0.7}
"""Shares of pictures. The aim is 0.9 for all of them; it is missed for pictures of seven to nine things, see
docs/tiny-vl.md for the figures."""


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in TINY_VL.iterdir()) <= 8_000_000


@pytest.mark.parametrize("num_stages", [1, 4])
def test_it_says_what_is_in_the_demo(num_stages: int) -> None:
    [said] = describe_pictures(TINY_VL, [Image.open(DEMO)], num_stages)
    assert read_caption(said) == Counter({("red", "circle"): 2, ("blue", "square"): 1})


def test_colours_shapes_and_counts_are_exact() -> None:
    drawn = score_pictures(NUM_PICTURES, seed=0)
    said = describe_pictures(TINY_VL, [image for image, _, _ in drawn])
    hits = [
        (read_caption(text) == counts, counts.total(), is_new)
        for text, (_, counts, is_new) in zip(said, drawn, strict=True)
    ]
    shares = {
        "up to six things": _share([hit for hit, total, _ in hits if total <= 6]),
        "up to nine things": _share([hit for hit, _, _ in hits]),
        "pairs never trained": _share([hit for hit, _, is_new in hits if is_new]),
    }
    print(f"\n{NUM_PICTURES} pictures: {shares}")
    for what, least in LEAST_EXACT.items():
        assert shares[what] >= least


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


@torch.inference_mode()
def test_transformers_says_the_same() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_VL)
    processor = Qwen2VLImageProcessorPil.from_pretrained(TINY_VL)
    model = Qwen3VLForConditionalGeneration.from_pretrained(TINY_VL, dtype=torch.float32).eval()
    images = [Image.open(DEMO), *(image for image, _, _ in score_pictures(3, seed=1))]
    content = [{"type": "image"}, {"type": "text", "text": DESCRIBE[0]}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    said = []
    for image in images:
        prepared = processor(images=[image], return_tensors="pt")
        num_tokens = int(prepared["image_grid_thw"].prod()) // 4
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens), return_tensors="pt").input_ids
        kinds = (ids == model.config.image_token_id).int()
        model.model.rope_deltas = None
        out = model.generate(input_ids=ids, mm_token_type_ids=kinds, **prepared, max_new_tokens=48, do_sample=False)
        said.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert said == describe_pictures(TINY_VL, images, num_stages=2)
