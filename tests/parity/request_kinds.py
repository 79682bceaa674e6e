"""Requests of all kinds to the embedded models: what any of them needs besides its text has to be kept by somebody."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from handing_over import Asked
from hf_models import make_checkpoint
from hf_vision import picture

from raypp.api.tokenizer import Tokenizer
from raypp.config.sections import ImagesSection
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.pictures.content import ImageContent
from raypp.pictures.fetch import Fetcher
from raypp.pictures.patches import place_pictures
from raypp.pictures.reader import PictureReader
from raypp.types import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model_path("tiny"))


def tokens_of(text: str) -> np.ndarray:
    return np.array(tokenizer().encode([text])[0], np.int32)


def make_with_tokens(family: str, seed: int, path: Path, **others: Any) -> Path:
    """Write a random model with the embedded model's tokenizer and end tokens to `path` and return it."""
    tiny = Path(resolve_model_path("tiny"))
    known = load_model_config(tiny)
    ids = {"vocab_size": known.vocab_size, "eos_token_id": list(known.eos_token_ids)}
    make_checkpoint(family, seed, path, **ids, **others)
    for file in tiny.iterdir():
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(file, path / file.name)
    return path


@cache
def requests_of_all_kinds() -> list[Asked]:
    rng = random.Random(0)
    model = load_model_config(resolve_model_path("tiny"))
    eos = frozenset(model.eos_token_ids)
    code, shared = tokens_of("def main("), tokens_of("import os\nimport sys\n\n\nclass Node:\n    def ")
    frequent = [int(token) for text in ("self", ",", ":\n") for token in tokens_of(text)][:3]
    common = tokens_of("for i in range(10):\n    self.x = y[i]\nreturn (a, b)\n\n\nclass Edge:\n    def g(self):\n")
    some = rng.sample(range(3, model.vocab_size), model.vocab_size // 2)

    def params(**values: Any) -> SamplingParams:
        return SamplingParams(**({"max_tokens": 48, "temperature": 0.0, "seed": rng.getrandbits(40)} | values))

    free = {"ignore_eos": True}
    ends = frozenset(common.tolist())
    words = tuple(tuple(tokens_of(word).tolist()) for word in ("self", "return", "name"))
    return [
        Asked("greedy", code, params(**free)),
        Asked("seeded", code, params(temperature=0.9, **free)),
        *(Asked(f"continuation {i}", shared, params(temperature=1.0, top_p=0.9, seed=i)) for i in range(3)),
        Asked("truncated", shared, params(temperature=1.2, top_k=20, min_p=0.02, **free)),
        Asked("penalties", code, params(presence_penalty=0.9, frequency_penalty=0.6, repetition_penalty=1.3, **free)),
        Asked("seeded penalties", shared, params(temperature=0.8, frequency_penalty=1.5, **free), priority=3),
        Asked(
            "min tokens",
            code,
            params(min_tokens=25, max_tokens=70, temperature=0.9),
            ends,
            priority=-1,
        ),
        Asked("stop tokens", shared, params(min_tokens=9, stop_token_ids=frequent, **free)),
        Asked("stop strings", shared, params(stop=["return", "zzz"], temperature=0.7)),
        Asked("bias", code, params(logit_bias={token: 4.0 for token in frequent}, allowed_token_ids=some, **free)),
        Asked("bad words", shared, params(bad_words=["self", "return", "name"], **free), bad_words=words),
        Asked("logprobs", code, params(logprobs=3, **free), priority=-1),
        Asked("logprobs of a draw", shared, params(logprobs=0, temperature=0.8, **free)),
        Asked("prompt logprobs", np.tile(shared, 4), params(logprobs=1, prompt_logprobs=2, **free)),
        Asked("json", code, params(structured_outputs={"json_schema": SCHEMA}, max_tokens=90), eos),
        Asked("seeded json", shared, params(structured_outputs={"json_schema": SCHEMA}, temperature=1.0), eos),
        Asked("regex", code, params(structured_outputs={"regex": r"([a-z]{2,9} ){9}[0-9]{6}"}, temperature=0.8), eos),
        Asked("repeats itself", np.tile(tokens_of("a, b, "), 9), params(**free)),
        Asked("one token", shared, params(max_tokens=1)),
        Asked("salted", shared, params(temperature=0.5, **free), cache_salt="a"),
        Asked("salted otherwise", shared, params(temperature=0.5, **free), cache_salt="b"),
    ]


def requests_with_pictures() -> list[Asked]:
    rng = random.Random(1)
    path = resolve_model_path("tiny-vl")
    model, words = load_model_config(path), Tokenizer(path)
    config, eos = model.vision, frozenset(model.eos_token_ids)
    assert config is not None
    reader = PictureReader(config, 1024, Fetcher(ImagesSection()))

    def text(content: str) -> list[int]:
        token_ids: list[int] = words.encode([content])[0].tolist()
        return token_ids

    def asked(name: str, parts: list[Any], **values: Any) -> Asked:
        token_ids, items = list[int](), []
        for part in parts:
            if isinstance(part, str):
                token_ids += text(part)
                continue
            [read] = reader.read([ImageContent(part, is_address=False)])
            token_ids += [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
            items += read.items
        params = SamplingParams(**({"max_tokens": 30, "temperature": 0.0, "seed": rng.getrandbits(40)} | values))
        if not items:
            return Asked(name, np.array(token_ids, np.int32), params, eos)
        placed, prompt_items = place_pictures(token_ids, items, config)
        return Asked(name, np.array(placed, np.int32), params, eos, items=prompt_items)

    first, second = picture(1, 90, 70), picture(2, 70, 120)
    return [
        asked("one", [first, "What is in the picture?"]),
        asked("another", ["hello ", second, "What is in the picture?"], temperature=0.9),
        asked("two", [first, "and", second, "how many?"], logprobs=2, prompt_logprobs=0),
        asked("the same twice", [first, first, "how many?"], temperature=0.6),
        asked("none", ["What is in the picture?"]),
        asked("choice", [second, "red?"], structured_outputs={"choice": ["there is one red circle", "there is none"]}),
    ]
