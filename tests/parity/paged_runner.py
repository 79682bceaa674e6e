"""Runs a built model over the paged cache the way a stage does, with block tables in random order.

A step is a list of (row, number of tokens, is it a decode row); rows keep their own length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from raypp.models.config import load_model_config
from raypp.models.registry import build_model
from raypp.models.weights import CheckpointWeights, WeightSource
from raypp.ops.attention import AttentionBatch
from raypp.ops.kv_cache import allocate_layer_cache

CPU = torch.device("cpu")


class PagedRunner:
    """The stages of a model, cut after the given layers, and the tokens of some rows.

    Args:
        path: The checkpoint.
        rows: Each row's tokens; steps feed them in order.
        cuts: Layers at which a new stage begins.
        block_size: Tokens per KV block.
        seed: Of the order in which rows own the blocks.
        source: Weights; None: the checkpoint's.
        kv_dtype: Of the KV caches.
    """

    def __init__(
        self,
        path: Path,
        rows: Sequence[Sequence[int]],
        *,
        cuts: Sequence[int] = (),
        block_size: int = 4,
        seed: int = 0,
        source: WeightSource | None = None,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        config = load_model_config(path)
        ends = [*cuts, config.num_layers]
        self.models = [
            build_model(config, start_layer=start, end_layer=end, dtype=torch.float32, device=CPU)
            for start, end in zip([0, *cuts], ends, strict=True)
        ]
        for model in self.models:
            model.load_weights(source or CheckpointWeights(path))
        self._rows = rows
        self._lens = [0] * len(rows)
        self._block_size = block_size
        blocks_per_row = -(-max(map(len, rows)) // block_size)
        blocks = list(range(1, 1 + len(rows) * blocks_per_row))
        random.Random(seed).shuffle(blocks)
        self._tables = torch.tensor(blocks, dtype=torch.int32).view(len(rows), blocks_per_row)
        self._num_groups = len(config.windows)
        sizes = [(each.num_kv_heads, each.k_dim, each.v_dim) for each in (layer.cache for layer in config.attention)]
        self._caches = [
            [
                allocate_layer_cache(1 + len(blocks), block_size, *of_layer, kv_dtype, CPU)
                for of_layer in sizes[start:end]
            ]
            for start, end in zip([0, *cuts], ends, strict=True)
        ]

    @torch.inference_mode()
    def step(
        self, decode: Sequence[int] = (), *, query_len: int = 1, prefill: Sequence[tuple[int, int]] = ()
    ) -> list[torch.Tensor]:
        """Feed `query_len` tokens of each decode row and the given number of each prefill row (row, tokens).

        Returns:
            The logits of each row's tokens, [tokens, V], in the order of the arguments.
        """
        counts = [(row, query_len) for row in decode] + list(prefill)
        positions, ids = [], []
        for row, count in counts:
            positions.append(torch.arange(self._lens[row], self._lens[row] + count))
            ids += self._rows[row][self._lens[row] : self._lens[row] + count]
            self._lens[row] += count
        rows = torch.tensor([row for row, _ in counts])
        query_lens = torch.tensor([count for _, count in counts])
        position = torch.cat(positions)
        tables = self._tables[rows]
        blocks = tables[torch.repeat_interleave(torch.arange(len(counts)), query_lens), position // self._block_size]
        seq_lens = [self._lens[row] for row, _ in counts]
        hidden = self.models[0].embed(torch.tensor(ids, dtype=torch.int32))
        for model, caches in zip(self.models, self._caches, strict=True):
            attention = AttentionBatch(
                num_decode_rows=len(decode),
                decode_query_len=query_len,
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
                block_tables=[tables] * self._num_groups,
                slot_mappings=[blocks.long() * self._block_size + position % self._block_size] * self._num_groups,
                prefill_query_lens=[count for _, count in prefill],
                prefill_seq_lens=seq_lens[len(decode) :],
            )
            hidden = model.forward(hidden, position, attention, caches)
        return list(self.models[-1].compute_logits(hidden).split([count for _, count in counts]))
