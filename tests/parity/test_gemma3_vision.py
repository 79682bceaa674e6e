"""Gemma 3 with its tower against transformers: an image's rows, in batches of all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hf_vision import hf_rows, make_gemma3_checkpoint, picture, picture_prompt
from op_tape import OpTapes

from raypp.encoder.build_encoder import choose_budgets
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, GraphChoice
from raypp.encoder.protocol import EncoderSpec
from raypp.errors import ConfigError
from raypp.graphs.buckets import Buckets
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.weights import CheckpointWeights

NUM_CONFIGURATIONS = 6
SIZES = ((40, 40), (90, 30), (17, 60), (64, 64), (8, 8))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return checkpoints, one per seed."""
    return [make_gemma3_checkpoint(seed, tmp_path_factory.mktemp(f"g-{seed}")) for seed in range(NUM_CONFIGURATIONS)]


def _items(path, sizes, seed=0):
    _, items = picture_prompt(path, [picture(seed + i, *size) for i, size in enumerate(sizes)])
    return list(items.items)


def _tower(path):
    return build_encoder(load_model_config(path), dtype=torch.float32, device=CPU, source=CheckpointWeights(path))


@pytest.mark.parametrize("seed", range(NUM_CONFIGURATIONS))
def test_embeddings_equal_transformers(checkpoints, seed):
    path = checkpoints[seed]
    tower, items = _tower(path), _items(path, SIZES, seed)
    each = items[0].num_tokens
    expected = hf_rows(path, items)
    budgets = Buckets({each, 2 * each, 4 * each})
    for maker in (None, OpTapes()):
        manager = EncoderCudaGraphManager(tower, budgets, 3, CPU, maker)
        with torch.inference_mode():
            manager.capture()
            manager.choice = GraphChoice(budgets, {})  # whatever was faster
            found = manager.encode(items)
            eager = tower.select_items(items, [4, 1])
            again = tower.split_output(tower.eager_forward(eager), eager)
        assert [batch.indices for batch in manager.pack(items)] == [(0, 1, 2), (3, 4)]
        assert manager.stats.num_padding_tokens == each
        for item, encoded, rows in zip(items, found, expected, strict=True):
            assert encoded.key == item.key
            assert encoded.rows.shape == rows.shape == (1, each, load_model_config(path).hidden_size)
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
