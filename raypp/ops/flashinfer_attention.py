"""Attention by FlashInfer (arXiv:2501.01005; flashinfer-python 0.6): decode through XQA, prefill through its wrapper.

XQA reads lengths and block tables on the device: nothing is planned, and a captured call serves rows of any length.
Prefill rows have lengths that the host knows; their work is planned on the host into one of a ring of buffers, which
are copied to the device without waiting. Kernels are compiled when first used and cached on disk.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import torch

from raypp.ops.attention import AttentionBatch, Heads

XQA_BLOCK_SIZES = (16, 32, 64, 128)
PREFILL_HEAD_DIMS = (64, 128, 256)
_XQA_CAPABILITIES = (9, 10, 12)
_MAX_XQA_GROUP = 32
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_LAYOUT = "HND"  # heads before tokens in a block, see raypp.ops.kv_cache


def missing_for_flashinfer(head_dim: int) -> str | None:
    """Return why FlashInfer cannot serve these heads, None if it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (pip install 'raypp[gpu]')"
    if head_dim not in PREFILL_HEAD_DIMS:
        return f"FlashInfer has no prefill kernel for head_dim={head_dim}, only for {PREFILL_HEAD_DIMS}"
    return None


def missing_for_xqa(num_heads: int, num_kv_heads: int, block_size: int, capability: tuple[int, int]) -> str | None:
    """Return why XQA cannot serve these heads on a device of this compute capability, None if it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (pip install 'raypp[gpu]')"
    if capability[0] not in _XQA_CAPABILITIES:
        return f"XQA needs compute capability 9, 10 or 12, not {capability[0]}.{capability[1]}"
    if num_heads // num_kv_heads > _MAX_XQA_GROUP:
        return f"XQA serves at most {_MAX_XQA_GROUP} query heads per KV head"
    if block_size not in XQA_BLOCK_SIZES:
        return f"XQA needs block_size in {XQA_BLOCK_SIZES}, not {block_size}"
    return None


class XqaDecode:
    """Decode attention; nothing happens on the host but a launch.

    Args:
        max_rows: The most rows of a call.
        max_query_len: The most query tokens of a row, 1 + K.
        device: Where tensors are.
    """

    def __init__(self, max_rows: int, max_query_len: int, device: torch.device) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        self._run = xqa_batch_decode_with_kv_cache
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # it counts in it, from 0
        self._masks = {query_len: causal_mask(query_len, max_rows, device) for query_len in range(2, max_query_len + 1)}

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        query_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [R * query_len, Hq, D]; kv_cache [2, num_blocks, Hk, block_size, D], this step's tokens included;
        seq_lens [R] int32, at most the tokens of a row's table; block_tables [R, W] int32 contiguous.
        """
        num_rows, max_seq_len = block_tables.shape[0], block_tables.shape[1] * kv_cache.shape[3]
        self._run(
            q,
            (kv_cache[0], kv_cache[1]),
            self._workspace,
            block_tables,
            seq_lens,
            max_seq_len,
            bmm1_scale=scale,
            out=out if query_len == 1 else out.view(num_rows, query_len, *out.shape[1:]),
            kv_layout=_LAYOUT,
            q_len_per_req=query_len,
            mask=None if query_len == 1 else self._masks[query_len][:num_rows],
        )


def causal_mask(query_len: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """Return which of a row's query tokens each sees, as bits: uint16 [num_rows, query_len, 2 * ceil(query_len / 32)].

    Bit j of token i is set where j <= i. Words are little endian; rows are padded to 32 bits.
    """
    num_words = 2 * -(-query_len // 32)
    rows = [(1 << (token + 1)) - 1 for token in range(query_len)]
    words = np.array([[row >> (16 * word) & 0xFFFF for word in range(num_words)] for row in rows], np.uint16)
    return torch.from_numpy(np.tile(words, (num_rows, 1, 1))).to(device)


class FlashInferPrefill:
    """Attention of prefill rows, planned on the host: a break point of graphs.

    A plan is written to pinned memory and copied from there by the device. Whoever plans anew in the same entry waits
    for that copy; steps that take entries in turn find it done.

    Args:
        heads: Of all layers.
        block_size: Of the KV cache.
        dtype: Of queries and cache.
        num_ring_entries: Plans that may be waiting for the device at a time.
        device: Where tensors are.
    """

    def __init__(
        self, heads: Heads, block_size: int, dtype: torch.dtype, num_ring_entries: int, device: torch.device
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype
        # One stream runs all steps, so they share the space for partial results; plans lie each in its own.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend="auto") for _ in range(num_ring_entries)
        ]
        self._copied = [torch.cuda.Event() for _ in range(num_ring_entries)]

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows, for `run`. Waits only for the copy of the entry's last plan."""
        heads, block_size = self._heads, self._block_size
        num_blocks = [math.ceil(seq_len / block_size) for seq_len in batch.prefill_seq_lens]
        tables = batch.block_tables[batch.num_decode_rows :]
        wrapper, copied = self._wrappers[ring_entry], self._copied[ring_entry]
        copied.synchronize()
        wrapper.plan(
            _prefix_sums(batch.prefill_query_lens),
            _prefix_sums(num_blocks),
            torch.cat([table[:count] for table, count in zip(tables.unbind(0), num_blocks, strict=False)]),
            _on_host([(n - 1) % block_size + 1 for n in batch.prefill_seq_lens]),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            block_size,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=_on_host(batch.prefill_seq_lens),
            max_token_per_sequence=max(batch.prefill_query_lens),
        )
        copied.record()
        return wrapper

    def run(self, plan: object, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [T, Hq, D], the tokens of the planned rows; kv_cache [2, num_blocks, Hk, block_size, D], this
        step's tokens included.
        """
        plan.run(q, (kv_cache[0], kv_cache[1]), out=out)  # type: ignore[attr-defined]


def _prefix_sums(counts: list[int]) -> torch.Tensor:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return _on_host(sums)


def _on_host(values: list[int]) -> torch.Tensor:
    """Return values that can be copied to the device without waiting, int32."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)
