"""The layers of any step that is not a recorded decode step: in pieces, padded to a size that was recorded, or plainly.

    hidden, positions, slots --copy--> [ buffers, zeros behind ] --> graph | attention | graph | ... --> [ output ]

Rows and their lengths differ from step to step; only attention sees them, as a break point. Everything else has a fixed
number of tokens. Padding is zeros, writes into the null block, and is attended by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from raypp.graphs.debug import Watched, only, owned_tokens
from raypp.graphs.graph_manager import CudaGraphManager
from raypp.messages import NULL_BLOCK
from raypp.models.decoder import Deepstack
from raypp.ops.attention import AttentionBatch
from raypp.stage.first_steps import padding_step
from raypp.stage.stage_model import StageModel
from raypp.stage.stage_spec import StageSpec

PIECEWISE = "piecewise"


class PaddedForward:
    """Runs the layers. T tokens of a step, P of its bucket, H hidden size.

    Args:
        spec: Of the stage.
        model: Its layers.
        kv_caches: Theirs.
        graphs: Keeps the recordings.
        sizes: Numbers of tokens to record for, the largest first; none: every step runs plainly.
    """

    def __init__(
        self,
        spec: StageSpec,
        model: StageModel,
        kv_caches: Sequence[torch.Tensor],
        graphs: CudaGraphManager,
        sizes: Sequence[int],
    ) -> None:
        self._spec = spec
        self._model = model
        self._kv_caches = kv_caches
        self._graphs = graphs
        self._sizes = sizes
        self._num_tokens = 0  # of the step that ran last
        if not sizes:
            return
        size, device, dtype = sizes[0], torch.device(spec.device), getattr(torch, spec.dtype)
        self._hidden = torch.zeros(size, model.hidden_size, dtype=dtype, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slots = torch.full((size,), NULL_BLOCK * spec.block_size, dtype=torch.int64, device=device)
        self._attended = torch.zeros(size, model.attention_size, dtype=dtype, device=device)
        self._output = torch.zeros(size, model.hidden_size, dtype=dtype, device=device)
        self._batches: dict[int, AttentionBatch] = {}  # by bucket: the same object for all steps, as recorded

    def record(self) -> tuple[int, ...]:
        """Record as many sizes as memory allows; return them. All rows are padding meanwhile."""
        return tuple(self._graphs.record_sizes(PIECEWISE, self._sizes, self._record))

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        bucket: int | None,
        deepstack: Deepstack | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after the layers, [T, H]; valid until the next step.

        Shapes: hidden [T, H], may be overwritten; positions [T] int64, or [T, 3] along axes: such a step runs plainly.

        Args:
            hidden: The residual stream.
            positions: Of the tokens.
            attention: The step, its attention planned.
            bucket: A size that was recorded, at least T; None: run plainly.
            deepstack: What the first layers add; such a step runs plainly, too.
        """
        if bucket is None or positions.ndim > 1 or deepstack is not None:
            return self._model.forward(hidden, positions, attention, self._kv_caches, deepstack)
        self._num_tokens = num_tokens = len(hidden)
        self._batches[bucket].adopt(attention)
        for buffer, values in (
            (self._hidden, hidden),
            (self._positions, positions),
            (self._slots, attention.slot_mapping),
        ):
            buffer[:num_tokens].copy_(values)
        if num_tokens < bucket:
            for buffer in (self._hidden, self._positions, self._slots, self._attended):
                buffer[num_tokens:bucket].zero_()
        self._graphs.run((PIECEWISE, bucket))
        return self._output[:num_tokens]

    def _record(self, bucket: int) -> None:
        step = padding_step(self._spec, bucket)
        self._model.plan_attention(step.attention, 0)
        batch = self._batches[bucket] = AttentionBatch(
            num_decode_rows=0,
            decode_query_len=1,
            seq_lens=step.attention.seq_lens,
            block_tables=step.attention.block_tables,
            slot_mapping=self._slots[:bucket],
            prefill_query_lens=[],
            prefill_seq_lens=[],
            padded_out=self._attended[:bucket],
        )
        batch.adopt(step.attention)
        self._num_tokens = bucket
        self._graphs.record(
            PIECEWISE,
            (PIECEWISE, bucket),
            partial(self._layers, bucket),
            breakable=True,
            watched=Watched(reads=({"KV cache": self._kv_caches},), changes=(self,), yields=self._yields),
        )

    def _layers(self, bucket: int) -> None:
        hidden = self._model.forward(
            self._hidden[:bucket], self._positions[:bucket], self._batches[bucket], self._kv_caches
        )
        self._output[:bucket].copy_(hidden)

    def _yields(self, result: None) -> dict[str, torch.Tensor]:
        num_tokens = self._num_tokens
        return {
            "output": only(owned_tokens(self._slots[:num_tokens], self._spec.block_size), self._output[:num_tokens])
        }
