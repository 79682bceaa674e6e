"""Grammars on a GPU: masks on recorded and on eager steps, with drafts and without, of rows beside free ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from structured_schemas import SCHEMAS

from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import FinishReason, SamplingParams

pytestmark = pytest.mark.gpu
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
NAMES = list(SCHEMAS)[::3]


@pytest.mark.parametrize(
    ("mode", "speculative", "late"),
    [
        ("none", NGRAM, False),
        ("full", None, True),
        ("full", NGRAM, False),
        ("full_and_piecewise", NGRAM, True),
        ("full_and_piecewise", None, False),
    ],
    ids=["none-drafts", "full-late", "full-drafts", "pieces-drafts-late", "pieces"],
)
def test_every_text_follows_its_schema(mode: str, speculative: dict[str, Any] | None, late: bool) -> None:
    settings = {"speculative": speculative} if speculative else {}
    config = EngineConfig.from_flat("tiny", device="cuda", num_kv_blocks=600, mode=mode, max_num_seqs=32, **settings)
    plan = plan_engine(config, Hardware.of_this_machine())
    engine = LocalEngine(plan, mask_lateness=random.Random(0) if late else None)
    tokenizer, eos = Tokenizer(plan.model_path), frozenset(plan.model.eos_token_ids)
    [prompt] = tokenizer.encode(["import json\n\nvalue = "])
    free = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    free_rows = [engine.submit(prompt, free) for _ in range(4)]
    requests = {}
    for seed, name in enumerate(NAMES):
        constraint = {"json_schema": SCHEMAS[name]}
        params = SamplingParams(max_tokens=400, seed=seed, structured_outputs=constraint)
        requests[name] = engine.submit(prompt, params, eos_token_ids=eos)
    single = SamplingParams(max_tokens=60, structured_outputs={"regex": "exactly this, and nothing else"})
    only = engine.submit(prompt, single, eos_token_ids=eos)
    while engine.has_unfinished:
        engine.step()
    engine.drain()
    assert tokenizer.decode(only.output_token_ids) == "exactly this, and nothing else"
    assert all(len(request.output_token_ids) == 150 for request in free_rows)
    for name, request in requests.items():
        text = tokenizer.decode(request.output_token_ids)
        assert request.finish_reason is FinishReason.STOP, (name, text)
        _check(name, text)
    print(f"{mode}, drafts {speculative is not None}, late {late}: {engine.stats().num_late_masks} late masks")


def _check(name: str, text: str) -> None:
    value = json.loads(text)
    try:
        import jsonschema
    except ImportError:
        return  # that it is JSON, and ended, says most
    try:
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(value)
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{name}: {text!r}") from error
