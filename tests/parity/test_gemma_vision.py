"""Gemma 3 and 4 with their towers against transformers: rows of images in batches, tokens of prompts with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from asked_here import ask_here
from exactness import ExactComparison
from hf_vision import (
    PromptMaker,
    hf_rows,
    hf_vision_choices,
    make_gemma3_checkpoint,
    make_gemma4_checkpoint,
    picture,
    picture_prompt,
)
from op_tape import OpTapes
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.encoder.build_encoder import choose_budgets
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, GraphChoice
from raypp.encoder.protocol import EncoderSpec
from raypp.errors import ConfigError
from raypp.graphs.buckets import Buckets
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.weights import CheckpointWeights
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_CONFIGURATIONS = sized(8, 16)
MEMBER_SEEDS = (1, 6, 11, 12)  # of two KV heads, and of one that both members have
MODULES_SEED = 7  # of a Gemma 4 whose layers are transformers' modules though raypp has them
NUM_NEW_TOKENS = sized(6, 16)
SIZES = ((40, 40), (90, 30), (17, 60), (64, 64), (8, 8))
CPU = torch.device("cpu")


MAKERS = {
    "gemma3": make_gemma3_checkpoint,
    "gemma4": make_gemma4_checkpoint,
    "gemma4 E": partial(make_gemma4_checkpoint, has_layer_inputs=True),
}


@pytest.fixture(autouse=True, scope="module")
def _asked_here():
    with pytest.MonkeyPatch.context() as patch:
        ask_here(patch)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return checkpoints by family, one per seed."""
    return {
        family: [make(seed, tmp_path_factory.mktemp(f"{family}-{seed}")) for seed in range(NUM_CONFIGURATIONS)]
        for family, make in MAKERS.items()
    }


@pytest.fixture
def checkpoints(made):
    return made["gemma3"]


def _items(path, sizes, seed=0):
    _, items = picture_prompt(path, [picture(seed + i, *size) for i, size in enumerate(sizes)])
    return list(items.items)


def _tower(path):
    return build_encoder(load_model_config(path), dtype=torch.float32, device=CPU, source=CheckpointWeights(path))


@pytest.mark.parametrize("seed", range(NUM_CONFIGURATIONS))
@pytest.mark.parametrize("family", MAKERS)
def test_embeddings_equal_transformers(made, family, seed):
    path = made[family][seed]
    tower, items = _tower(path), _items(path, SIZES, seed)
    each = load_model_config(path).vision.tokens_per_max_image
    expected = hf_rows(path, items)
    budgets = Buckets({each, 2 * each, 4 * each})
    for maker in (None, OpTapes()) if family == "gemma3" else (None,):  # on a CPU segments are of host's lengths
        manager = EncoderCudaGraphManager(tower, budgets, 3, CPU, maker)
        with torch.inference_mode():
            manager.capture()
            manager.choice = GraphChoice(budgets, {})  # whatever was faster
            found = manager.encode(items)
            eager = tower.select_items(items, [4, 1])
            again = tower.split_output(tower.eager_forward(eager), eager)
        if family == "gemma3":  # images are of one size
            assert [batch.indices for batch in manager.pack(items)] == [(0, 1, 2), (3, 4)]
            assert manager.stats.num_padding_tokens == each
        else:
            assert len({item.num_tokens for item in items}) > 1
            assert manager.stats.num_padding_tokens > 0
        for item, encoded, rows in zip(items, found, expected, strict=True):
            assert encoded.key == item.key
            assert encoded.rows.shape == rows.shape == (1, item.num_tokens, load_model_config(path).hidden_size)
            torch.testing.assert_close(encoded.rows, rows, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(again[0].rows, expected[4], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(again[1].rows, expected[1], atol=2e-4, rtol=1e-4)


def test_budgets_are_whole_images(checkpoints):
    tower = _tower(checkpoints[2])
    each = tower.budget_range().min_tokens
    spec = EncoderSpec(
        encoder_index=0,
        model_path="",
        load_format="auto",
        dtype="float32",
        device="cpu",
        seed=0,
        num_threads=1,
        captures=False,
        token_budgets=None,
        max_images_per_batch=4,
        memory_bytes=0,
        cache_bytes=0,
        link_bytes=0,
    )
    assert all(size % each == 0 for size in choose_budgets(tower, spec, CPU).sizes)
    assert choose_budgets(tower, spec, CPU).sizes[-1] == 4 * each
    with pytest.raises(ConfigError, match="token_budgets"):
        choose_budgets(tower, replace(spec, token_budgets=(each, each + 1)), CPU)


def test_images_find_room_in_a_step(checkpoints):
    """With drafts at the usual sizes, too; a plan that would refuse every image is refused itself."""
    path = checkpoints[2]
    each = load_model_config(path).vision.tokens_per_max_image
    plan = plan_engine(EngineConfig.from_flat(str(path), method="ngram", max_model_len=176), Hardware(1))
    limits = plan.scheduler_limits()
    assert limits.whole_item_tokens == each <= limits.max_whole_item_tokens
    few = {"max_num_seqs": 64, "max_num_batched_tokens": 63 + each - 1, "max_model_len": 176}
    with pytest.raises(ConfigError, match="too small for an image") as caught:
        plan_engine(EngineConfig.from_flat(str(path), **few), Hardware(1))
    assert f"at least {63 + each}" in str(caught.value)
    plan_engine(EngineConfig.from_flat(str(path), num_encoders=0, **few), Hardware(1))


def _prompts(path, seed, vocab_size):
    """Return prompts that mix text and images; each begins with a token of its own."""
    maker = PromptMaker(seed, vocab_size, SIZES)
    text, image = maker.text, maker.image
    layouts = [
        *maker.usual_layouts(),
        [text(22, 40), image(3), image(4), text(0, 2), image(3), text(1, 9)],
        [text(20, 40)],
    ]
    return maker.prompts(path, layouts)


@pytest.mark.parametrize("family", MAKERS)
def test_tokens_equal_transformers(made, family):
    comparison, met = ExactComparison(), Counter()
    for seed, path in enumerate(made[family]):
        model = load_model_config(path)
        settings = {
            "num_stages": min(1 + seed % 4, len(model.stage_begins)),
            "tensor_parallel_size": 1 + (seed in MEMBER_SEEDS),
            "block_size": (4, 8, 16)[seed % 3],
            "max_num_batched_tokens": (20, 26, 64)[(seed + seed // 3) % 3],
            "min_prefill_chunk_tokens": (3, 8)[seed // 2 % 2],
            "enable_prefix_caching": seed != 4,
            "max_num_seqs": 4,
            "max_model_len": 176,
            "num_kv_blocks": 1 + (192 if seed % 3 == 2 else 2400) // (4, 8, 16)[seed % 3],
            "stage_num_threads": 1,
            "mode": ("none", "full", "full_and_piecewise")[seed % 3],
        }
        if seed % 5 in (1, 2):
            settings |= {"method": "ngram", "num_speculative_tokens": 1, "min_n": 1}
        if family == "gemma4" and seed == MODULES_SEED:
            settings |= {"model_impl": "transformers"}
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
        engine, prompts = LocalEngine(plan), _prompts(path, seed, model.vocab_size)
        items_of = {prompt[0]: items for prompt, items in prompts}

        def generate(listed, lengths, engine=engine, items_of=items_of):
            requests = []
            for prompt, length in zip(listed, lengths, strict=True):
                params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
                requests.append(engine.submit(prompt, params, items=items_of[prompt[0]]))
            while engine.has_unfinished:
                engine.step()
            return [request.output_token_ids for request in requests]

        def reference(path, prompt, output, items_of=items_of):
            return hf_vision_choices(path, prompt, items_of[prompt[0]], output)

        for _ in range(2 if plan.config.cache.enable_prefix_caching else 1):
            num_new = NUM_NEW_TOKENS if seed % 3 != 2 else 48  # of rows that grow until some must go
            comparison.compare(path, [prompt for prompt, _ in prompts], num_new, generate, reference)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        met[f"{len(plan.stages)} stages"] += 1
        met["members"] += plan.num_members > 1
        met["chunks"] += max(len(prompt) for prompt, _ in prompts) > settings["max_num_batched_tokens"]
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["preempted"] += stats.num_preemptions > 0
        met["drafts accepted"] += stats.num_accepted_tokens > 0
    print(f"\n{family}: {dict(met)}")
    comparison.assert_rare()
    for what in ("1 stages", "2 stages", "3 stages", "members", "chunks", "cached", "preempted", "drafts accepted"):
        assert met[what] >= 2, f"{what} was met only {met[what]} times"
