"""Qwen3-VL and Qwen3.5 against transformers: the tower's rows, positions, and tokens through scheduler and stages."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from exactness import ExactComparison
from hf_vision import (
    FIRST_TEXT_TOKEN,
    IMAGE,
    VIDEO,
    PromptMaker,
    hf_rows,
    hf_vision_choices,
    load_vision_reference,
    make_vision_checkpoint,
    picture,
    picture_prompt,
)
from mtp_reference import add_mtp_head
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.weights import CheckpointWeights
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

NUM_CONFIGURATIONS = 16  # the last four of Qwen3.5
MTP_SEEDS = (12, 15)
MEMBER_SEEDS = (2, 5, 7, 13)  # their heads can be cut; of deepstack, experts, states
NUM_NEW_TOKENS = sized(8, 16)
SIZES = ((40, 40), (90, 30), (17, 60), (64, 64), (33, 47), (8, 8))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function from a seed to a checkpoint; each is made once."""
    made = {}

    def checkpoint(seed):
        if seed not in made:
            made[seed] = make_vision_checkpoint(seed, tmp_path_factory.mktemp(f"vl-{seed}"), min_layers=1 + seed % 4)
            if seed in MTP_SEEDS:
                add_mtp_head(made[seed], seed)
        return made[seed]

    return checkpoint


def _items(path, sizes, seed=0):
    _, items = picture_prompt(path, [picture(seed + i, *size) for i, size in enumerate(sizes)])
    return list(items.items)


def test_embeddings_and_deepstack_rows_equal_transformers(checkpoints):
    taps = set()
    for seed in range(NUM_CONFIGURATIONS):
        path = checkpoints(seed)
        config = load_model_config(path)
        tower = build_encoder(config, dtype=torch.float32, device=torch.device("cpu"), source=CheckpointWeights(path))
        items = _items(path, SIZES, seed)
        with torch.inference_mode():
            together = tower.select_items(items, range(len(items)))
            found = tower.split_output(tower.eager_forward(together), together)
            alone = [tower.select_items(items, [index]) for index in range(len(items))]
            single = [tower.split_output(tower.eager_forward(batch), batch)[0] for batch in alone]
        taps.add(config.num_deepstack_layers)
        for item, encoded, by_itself, expected in zip(items, found, single, hf_rows(path, items), strict=True):
            assert encoded.key == by_itself.key == item.key
            assert (
                encoded.rows.shape
                == expected.shape
                == (1 + config.num_deepstack_layers, item.num_tokens, config.hidden_size)
            )
            torch.testing.assert_close(encoded.rows, expected, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(encoded.rows, by_itself.rows, atol=2e-4, rtol=1e-4)
    assert taps == {0, 1, 2, 3}


def test_positions_equal_transformers(checkpoints):
    path = checkpoints(1)
    text = [[FIRST_TEXT_TOKEN + i] * n for i, n in enumerate((3, 1, 5, 2))]
    frames = [picture(9 + i, 40, 30) for i in range(3)]
    parts = [text[0], picture(1, 90, 30), picture(2, 17, 60), text[1], frames, text[2], picture(3, 8, 8), text[3]]
    token_ids, items = picture_prompt(path, parts)
    ids = torch.tensor([token_ids])
    grids = {
        token: torch.tensor(
            [i.grid_thw for i, start in zip(items.items, items.starts, strict=True) if token_ids[start] == token]
        )
        for token in (IMAGE, VIDEO)
    }
    assert len(grids[VIDEO]) == 2  # three frames, two at a time
    positions, deltas = load_vision_reference(path).model.get_rope_index(
        ids, (ids == IMAGE).int() + 2 * (ids == VIDEO).int(), grids[IMAGE], grids[VIDEO]
    )
    assert items.rope_positions(len(token_ids)).T.tolist() == positions[:, 0].tolist()
    assert items.position_offset == int(deltas)


def _prompts(path, seed, vocab_size):
    """Return prompts that mix text and pictures; each begins with a token of its own."""
    maker = PromptMaker(seed, vocab_size, SIZES)
    text, image = maker.text, maker.image
    layouts = [
        *maker.usual_layouts(),
        [text(2, 4), image(3), image(4), image(5), text(1, 9)],
        [text(1, 5), [picture(7, 40, 30) for _ in range(1 + seed % 4)], text(1, 5)],
        [text(20, 40)],
    ]
    return maker.prompts(path, layouts)


def _partition(num_layers, num_stages, taps):
    """Return layers per stage; where it can be, the first stage holds fewer than deepstack needs."""
    if num_stages == 1 or taps < 2:
        return None
    rest = num_layers - 1
    cuts = [rest * index // (num_stages - 1) for index in range(num_stages)]
    return [1, *(b - a for a, b in pairwise(cuts))]


def test_tokens_equal_transformers(checkpoints):
    comparison, met = ExactComparison(), Counter()
    for seed in range(NUM_CONFIGURATIONS):
        path, num_stages = checkpoints(seed), 1 + seed % 4
        model = load_model_config(path)
        partition = _partition(model.num_layers, num_stages, model.num_deepstack_layers) if seed >= 4 else None
        settings = {
            "num_stages": num_stages,
            "tensor_parallel_size": 1 + (seed in MEMBER_SEEDS),
            "layer_partition": partition,
            "block_size": (4, 8, 16)[seed % 3],
            "max_num_batched_tokens": (16, 24, 64)[seed % 3],
            "min_prefill_chunk_tokens": (3, 8)[seed % 2],
            "enable_prefix_caching": seed % 3 != 2,
            "max_num_seqs": 8,
            "max_model_len": 176,
            "num_kv_blocks": 1 + (192 if seed % 5 in (2, 4) else 2400) // (4, 8, 16)[seed % 3],
            "stage_num_threads": 1,
            "mode": ("none", "full", "full_and_piecewise")[seed // 4 % 3],
        }
        if seed % 6 in (1, 2):
            settings |= {"method": "ngram", "num_speculative_tokens": 2, "min_n": 1}
        elif seed in MTP_SEEDS:
            settings |= {"method": "mtp", "num_speculative_tokens": 2}
        plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1))
        engine = LocalEngine(plan, has_nodes=bool(seed % 2))  # members: of seeds 5, 7 and 13 they send slices
        prompts = _prompts(path, seed, model.vocab_size)
        items_of = {prompt[0]: items for prompt, items in prompts}

        def generate(listed, lengths, engine=engine, items_of=items_of):
            requests = [
                engine.submit(
                    prompt,
                    SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
                    items=items_of[prompt[0]],
                )
                for prompt, length in zip(listed, lengths, strict=True)
            ]
            while engine.has_unfinished:
                engine.step()
            return [request.output_token_ids for request in requests]

        def reference(path, prompt, output, items_of=items_of):
            return hf_vision_choices(path, prompt, items_of[prompt[0]], output)

        for _ in range(2 if plan.config.cache.enable_prefix_caching else 1):
            comparison.compare(path, [prompt for prompt, _ in prompts], NUM_NEW_TOKENS, generate, reference)
        engine.scheduler.check_integrity()
        stats, first = engine.stats(), plan.stage_spec(0)
        met[f"{num_stages} stages"] += 1
        met["members"] += plan.num_members > 1
        met["experts"] += model.experts is not None
        met["states"] += model.has_row_states
        met["drafts of a head refused"] += seed in MTP_SEEDS and stats.num_draft_tokens > stats.num_accepted_tokens
        met["carried"] += first.num_carried_taps > 0
        met["kept"] += num_stages > 1 and model.num_deepstack_layers > 0 and not first.num_carried_taps
        met["cut"] += (
            max(item.num_tokens for _, i in prompts if i for item in i.items) > settings["max_num_batched_tokens"]
        )
        met["cached"] += stats.num_prefix_hit_tokens > 0
        met["preempted"] += stats.num_preemptions > 0
        met["drafts accepted"] += stats.num_accepted_tokens > 0
    print(f"\nvision: {dict(met)}")
    comparison.assert_rare()
    for what in (
        "1 stages",
        "2 stages",
        "3 stages",
        "4 stages",
        "members",
        "carried",
        "kept",
        "cut",
        "cached",
        "drafts accepted",
        "experts",
        "states",
        "drafts of a head refused",
    ):
        assert met[what] >= 2, f"{what} was met only {met[what]} times"
    assert met["preempted"] >= 1


def test_only_the_same_picture_shares_blocks(checkpoints):
    path = checkpoints(2)
    settings = {"block_size": 4, "max_model_len": 176, "num_kv_blocks": 200, "stage_num_threads": 1}
    engine = LocalEngine(plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1)))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    before, after = [FIRST_TEXT_TOKEN] * 7, [FIRST_TEXT_TOKEN + 1] * 9

    def cached(*pictures):
        token_ids, items = picture_prompt(path, [before, *pictures, after])
        request = engine.submit(token_ids, params, items=items)
        while engine.has_unfinished:
            engine.step()
        choices, _ = hf_vision_choices(path, token_ids, items, request.output_token_ids)
        assert request.output_token_ids == choices
        return request.num_cached_tokens, len(token_ids)

    one, other, last = picture(1, 40, 40), picture(2, 40, 40), picture(3, 40, 40)
    shared_text = (len(before) + 1) // 4 * 4  # with the mark that a picture begins
    assert cached(one)[0] == 0
    found, num_tokens = cached(one)
    assert found == (num_tokens - 1) // 4 * 4
    assert cached(other)[0] == shared_text
    assert cached(one, other)[0] > shared_text
    found, num_tokens = cached(one, other)
    assert found == (num_tokens - 1) // 4 * 4
    assert shared_text < cached(one, last)[0] < found - len(after)
