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
LEAST_EXACT = 0.9
"""Share of pictures, and of those with a pair that was never trained."""


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in TINY_VL.iterdir()) <= 8_000_000


@pytest.mark.parametrize("num_stages", [1, 4])
def test_it_says_what_is_in_the_demo(num_stages: int) -> None:
    [said] = describe_pictures(TINY_VL, [Image.open(DEMO)], num_stages)
    assert read_caption(said) == Counter({("red", "circle"): 2, ("blue", "square"): 1})


def test_colours_shapes_and_counts_are_exact() -> None:
    drawn = score_pictures(NUM_PICTURES, seed=0)
    said = describe_pictures(TINY_VL, [image for image, _, _ in drawn])
    hits = [read_caption(text) == counts for text, (_, counts, _) in zip(said, drawn, strict=True)]
    new_hits = [hit for hit, (_, _, is_new) in zip(hits, drawn, strict=True) if is_new]
    shares = [sum(some) / len(some) for some in (hits, new_hits)]
    print(f"\n{NUM_PICTURES} pictures: {shares[0]:.3f} exact, {shares[1]:.3f} of pairs never trained")
    assert min(shares) >= LEAST_EXACT


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
