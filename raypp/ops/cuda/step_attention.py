"""Attention on a GPU: append to the cache, then decode rows by one kernel and prefill rows by another.

all tokens      norm, rotation, KV append                       one Triton launch
decode rows     Triton, split along the context                 lengths on the device, capturable
prefill rows    FlashInfer's planned prefill, else torch        lengths from the host: a break point of graphs
... wide heads  the kernel of decode rows, piece by piece       the same
... with spans  torch, see `AttentionBatch.prefill_spans`       the same

Sinks are no part of FlashInfer's kernels here: its output is rescaled by what they add to the softmax's sum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import mul, sub
from typing import Any, NamedTuple, Protocol

import torch

from raypp.errors import install
from raypp.ops.attention import AttentionBatch, Heads, Rotation, Span
from raypp.ops.break_point import break_point
from raypp.ops.cuda.decode_attention import TritonDecode
from raypp.ops.cuda.heads import append_heads, gate_heads_, gather_heads
from raypp.ops.cuda.invariant_attention import InvariantAttention
from raypp.ops.cuda.kernel_launch import NUM_COUNTERS, Device, Workspace
from raypp.ops.kv_cache import FP8, LayerCache, movable
from raypp.ops.row_attention import RowPiece, attend_piece, piece_mask, row_pieces

MAX_FUSED_TOKENS = 16
"""Up to so many tokens of decode rows, the attention kernel makes the heads itself, once per split and KV head."""

PREFILL_HEAD_DIMS = (64, 128, 256)
MOST_OF_TORCH = 256
"""Elements of a head from which on torch's attention would hold all scores of a row at once."""
PIECE_TOKENS = 16
"""Of a prefill row whose heads are wider, that count as a decode row."""
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_LAYOUT = "HND"  # heads before tokens in a block, see raypp.ops.kv_cache
_COPY_BYTES = 128 << 20  # of keys and values that lie one after the other, of all rows of a step
LEAST_QUERIES_OF_COPIES = {torch.bfloat16: 512, torch.float16: 512, FP8: 128}
"""Queries per key, in the mean, from which a copy pays, by the cache's type: it costs as much for any number."""
_HAS_COPIES = (9, 0)  # compute capability with FlashAttention-3
_LOG = logging.getLogger(__name__)


class Prefill(Protocol):
    """Attention of prefill rows."""

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows."""

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        """Write the output to `out`; see `FlashInferPrefill`."""


def has_flashinfer() -> bool:
    """Return whether FlashInfer is installed."""
    return find_spec("flashinfer") is not None


def missing_for_flashinfer(heads: Heads) -> str | None:
    """Return why FlashInfer cannot serve these heads, None if it can."""
    if not has_flashinfer():
        return f"flashinfer-python is not installed ({install('gpu')})"
    sizes = heads.head_dim, heads.value_dim
    if heads.head_dim not in PREFILL_HEAD_DIMS or sizes[0] != sizes[1]:
        expected = f"only for one of {PREFILL_HEAD_DIMS}, the same of keys and values"
        return f"FlashInfer has no prefill kernel for head_dim={sizes[0]} with values of {sizes[1]}, {expected}"
    return None


@dataclass(frozen=True, eq=False, slots=True)
class CopyPlan:
    """A plan over copied keys and values: FlashInfer's, and what is copied."""

    ragged: Any  # a planned BatchPrefillWithRaggedKVCacheWrapper
    tables: torch.Tensor  # [rows, blocks] int32
    starts: torch.Tensor  # [rows + 1] int32: where each row's tokens lie in the copy
    num_tokens: int  # of the copy
    most_blocks: int  # of a row


class PrefillSpace:
    """Memory for FlashInfer that all kinds of heads share: one stream runs all steps.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        """For partial results."""
        self.has_copies = torch.cuda.get_device_capability(device) == _HAS_COPIES
        """Whether keys and values are read faster where they lie one after the other."""
        self._copy = torch.empty(_COPY_BYTES if self.has_copies else 0, dtype=torch.uint8, device=device)

    def copy_of(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return room for keys and values that lie one after the other, [2, tokens, Hk, D]; no tokens: no copies."""
        token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        num_tokens = len(self._copy) // token_bytes
        return self._copy[: num_tokens * token_bytes].view(dtype).view(2, num_tokens, num_kv_heads, head_dim)


class FlashInferPrefill:
    """Attention of prefill rows by FlashInfer (arXiv:2501.01005), planned on the host: a break point of graphs.

    Its kernels are compiled when they are first used, and cached on disk. Hopper's (FlashAttention-3, arXiv:2407.08608)
    read keys and values by the tensor memory accelerator where these lie one after the other; blocks of a cache are
    gathered by threads, which takes longer. So long chunks attend to a copy of their rows' keys and values, made once a
    layer, also in 16 bits where the cache has 8. With a window nothing is copied: a chunk gets those blocks of its row
    that it sees, since others may hold what is no number.

    A plan is written to pinned memory and copied from there by the device. Planning anew in the same entry waits for
    that copy; steps take entries in turn, and find it done.

    Args:
        heads: Of all layers of the kind.
        block_size: Of the KV cache.
        dtype: Of queries.
        kv_dtype: Of the cache. FlashInfer multiplies keys in 8 bits with queries in 16 by its older kernels.
        num_ring_entries: Plans that may be waiting for the device at a time.
        device: Where tensors are.
        least_queries: See `LEAST_QUERIES_OF_COPIES`, which it replaces.
        space: Shared with other kinds of heads; None: its own.
    """

    def __init__(
        self,
        heads: Heads,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_ring_entries: int,
        device: torch.device,
        least_queries: float | None = None,
        space: PrefillSpace | None = None,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._device = Device.of(device)
        space = space or PrefillSpace(device)
        workspace, entries = space.workspace, range(num_ring_entries)  # plans lie each in memory of its own
        self._wrappers = [BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend="auto") for _ in entries]
        self._ragged: list[Any] = []
        self._copy = space.copy_of(heads.num_kv_heads, heads.head_dim, dtype)
        self._least_queries = LEAST_QUERIES_OF_COPIES[kv_dtype] if least_queries is None else least_queries
        if self._copy.shape[1] and heads.window is None:
            self._ragged = [BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3") for _ in entries]
        self._copied = [torch.cuda.Event() for _ in entries]

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        """Return the plan of the batch's prefill rows, for `run`. Waits only for the copy of the entry's last plan."""
        copied = self._copied[ring_entry]
        copied.synchronize()
        num_keys = sum(batch.prefill_seq_lens)
        num_pairs = sum(map(mul, batch.prefill_query_lens, batch.prefill_seq_lens))
        has_room = bool(self._ragged) and num_keys <= self._copy.shape[1]
        pays = num_pairs >= self._least_queries * num_keys
        planned = (self._plan_copies if has_room and pays else self._plan_blocks)(batch, ring_entry)
        copied.record()
        return planned

    def run(self, plan: Any, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        """Write the attention's output to `out`.

        Shapes: q, out [T, Hq, D], the tokens of the planned rows. The cache has this step's tokens; `heads` has the
        layer's scales and sinks.
        """
        if isinstance(plan, CopyPlan):
            keys, values = self._copy[:, : plan.num_tokens]
            gather_heads(cache, plan.tables, plan.starts, plan.most_blocks, heads, keys, values, self._device)
            run = partial(plan.ragged.run, q, keys, values, out=out)
        else:
            scales = {"k_scale": heads.k_scale, "v_scale": heads.v_scale} if cache.keys.dtype == FP8 else {}
            run = partial(plan.run, q, tuple(cache), out=out, **scales)  # FlashInfer's, which has no types
        if heads.sinks is None:
            run()
        else:
            _, log2_sums = run(return_lse=True)  # [T, Hq], of the softmax without sinks, to the base of 2
            out.mul_(torch.sigmoid(log2_sums * math.log(2) - heads.sinks).unsqueeze(2))

    def _plan_copies(self, batch: AttentionBatch, ring_entry: int) -> CopyPlan:
        heads, ragged, starts = self._heads, self._ragged[ring_entry], prefix_sums(batch.prefill_seq_lens)
        ragged.plan(
            prefix_sums(batch.prefill_query_lens),
            starts,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            causal=True,
            sm_scale=heads.scale,
            logits_soft_cap=heads.soft_cap,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        tables = batch.block_tables[heads.group][batch.num_decode_rows :]
        most_blocks = math.ceil(max(batch.prefill_seq_lens) / self._block_size)
        starts_there = starts.to(self._device.torch_device, non_blocking=True)
        return CopyPlan(ragged, tables, starts_there, sum(batch.prefill_seq_lens), most_blocks)

    def _plan_blocks(self, batch: AttentionBatch, ring_entry: int) -> object:
        heads, block_size, wrapper = self._heads, self._block_size, self._wrappers[ring_entry]
        tables, seq_lens = batch.block_tables[heads.group][batch.num_decode_rows :], batch.prefill_seq_lens
        firsts = [0] * len(seq_lens)  # blocks
        if heads.window is not None:  # a row begins with the block of the first token that its first query sees
            before = map(sub, seq_lens, batch.prefill_query_lens)
            firsts = [max(0, first_query + 1 - heads.window) // block_size for first_query in before]
            seq_lens = [seq_len - first * block_size for seq_len, first in zip(seq_lens, firsts, strict=True)]
        ends = [first + math.ceil(seq_len / block_size) for first, seq_len in zip(firsts, seq_lens, strict=True)]
        rows = zip(tables.unbind(0), firsts, ends, strict=False)
        wrapper.plan(
            prefix_sums(batch.prefill_query_lens),
            prefix_sums([end - first for first, end in zip(firsts, ends, strict=True)]),
            torch.cat([table[first:end] for table, first, end in rows]),
            _on_host([(n - 1) % block_size + 1 for n in seq_lens]),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            block_size,
            causal=True,
            sm_scale=heads.scale,
            logits_soft_cap=heads.soft_cap,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            window_left=-1 if heads.window is None else heads.window - 1,
            seq_lens=_on_host(seq_lens),
            max_token_per_sequence=max(batch.prefill_query_lens),
        )
        return wrapper


class SdpaPiece(NamedTuple):
    """Tokens of a prefill row, [start, end) of the queries, and the blocks with what they see."""

    start: int
    end: int
    piece: RowPiece
    num_before: int  # tokens of the row before the step
    blocks: torch.Tensor  # [blocks] int64


class SdpaPrefill:
    """Attention of prefill rows by torch alone, row by row; see `FlashInferPrefill`, whose interface this has.

    Args:
        heads: Of all layers of the kind.
        block_size: Of the KV cache.
        dtype: Of queries.
    """

    def __init__(self, heads: Heads, block_size: int, dtype: torch.dtype) -> None:
        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        heads, block_size, pieces, start = self._heads, self._block_size, list[SdpaPiece](), 0
        tables = batch.block_tables[heads.group][batch.num_decode_rows :]
        spans: Sequence[Sequence[Span] | None] = batch.prefill_spans or [None] * len(batch.prefill_query_lens)
        for table, query_len, seq_len, of_row in zip(
            tables.unbind(0), batch.prefill_query_lens, batch.prefill_seq_lens, spans, strict=False
        ):
            for piece in row_pieces(query_len, seq_len, heads, block_size, of_row):
                blocks = table[piece.first // block_size : -(-piece.last // block_size)].long()
                tokens = start + piece.begin, start + piece.end
                pieces.append(SdpaPiece(*tokens, piece, seq_len - query_len, blocks))
            start += query_len
        return pieces

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        assert isinstance(plan, list)
        k_scale, v_scale = (heads.k_scale, heads.v_scale) if cache.keys.dtype == FP8 else (1.0, 1.0)
        for start, end, piece, num_before, blocks in plan:
            keys, values = (
                movable(side).index_select(0, blocks).view(side.dtype).to(q.dtype).transpose(0, 1).flatten(1, 2)
                for side in cache
            )
            num_keys, scale = piece.last - piece.first, heads.scale * k_scale
            mask = piece_mask(piece, num_before, self._heads, self._dtype, q.device)  # of all pieces they are large
            attended = attend_piece(
                q[start:end], keys[:, :num_keys], values[:, :num_keys], mask, heads, scale, sees_ahead=piece.sees_ahead
            )
            out[start:end] = attended * v_scale


class PiecesOfRows(NamedTuple):
    """Pieces of prefill rows, of as many tokens each, as the kernel of decode rows takes them."""

    size: int  # tokens of a piece
    tokens: torch.Tensor  # [pieces * size] int64, of the queries
    seq_lens: torch.Tensor  # [pieces] int32: what the last token of each sees
    tables: torch.Tensor  # [pieces, blocks] int32


class PiecewisePrefill:
    """Attention of prefill rows by the kernel of decode rows, a few tokens at a time; see `FlashInferPrefill`.

    What a row has behind a piece is not seen by it, so each piece is a decode row that ends there.

    Args:
        decode: The kernel, for pieces of `PIECE_TOKENS` and less.
        heads: Of all layers of the kind.
        device: Where tensors are.
    """

    def __init__(self, decode: TritonDecode, heads: Heads, device: Device) -> None:
        self._decode = decode
        self._heads = heads
        self._most_pieces = NUM_COUNTERS // heads.num_heads
        self._device = device.torch_device

    def plan(self, batch: AttentionBatch, ring_entry: int) -> object:
        tables, pieces = batch.block_tables[self._heads.group][batch.num_decode_rows :], list[PiecesOfRows]()
        for size in (PIECE_TOKENS, 1):  # what is left of a row goes token by token
            found, start = list[tuple[int, int, int]](), 0
            for row, (query_len, seq_len) in enumerate(
                zip(batch.prefill_query_lens, batch.prefill_seq_lens, strict=True)
            ):
                whole = query_len // PIECE_TOKENS * PIECE_TOKENS
                for at in range(0, whole, size) if size > 1 else range(whole, query_len):
                    found.append((row, start + at, seq_len - query_len + at + size))
                start += query_len
            for begin in range(0, len(found), self._most_pieces):
                some = found[begin : begin + self._most_pieces]
                numbers = _on_host([number for column in zip(*some, strict=True) for number in column])
                rows, firsts, seq_lens = numbers.to(self._device, non_blocking=True).chunk(3)
                tokens = (firsts.long().unsqueeze(1) + torch.arange(size, device=self._device)).view(-1)
                pieces.append(PiecesOfRows(size, tokens, seq_lens, tables.index_select(0, rows)))
        return pieces

    def run(self, plan: object, q: torch.Tensor, cache: LayerCache, heads: Heads, out: torch.Tensor) -> None:
        assert isinstance(plan, list)
        for size, tokens, seq_lens, tables in plan:
            attended = out.new_empty(len(tokens), *out.shape[1:])
            self._decode(q.index_select(0, tokens), cache, seq_lens, tables, size, heads, attended)
            out.index_copy_(0, tokens, attended)


def prefix_sums(counts: list[int]) -> torch.Tensor:
    """Return where each of some parts begins, and where the last ends, int32; see `_on_host`."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return _on_host(sums)


def _on_host(values: list[int]) -> torch.Tensor:
    """Return values that can be copied to the device without waiting, int32."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)


class CudaAttention:
    """The attention of all layers of a kind: their heads differ in norms, scales and values of sinks alone.

    Args:
        heads: Of any of these layers.
        block_size: Of the KV cache.
        dtype: Of activations.
        kv_dtype: Of the KV cache.
        max_query_len: The most query tokens of a decode row, 1 + K.
        num_ring_entries: Steps that may be planned at a time.
        device: Where it runs.
        workspace: Shared with other kernels.
        space: Returns what kinds share for prefill; called where FlashInfer has a kernel.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_query_len: int,
        num_ring_entries: int,
        device: Device,
        workspace: Workspace,
        space: Callable[[], PrefillSpace],
    ) -> None:
        self._device = device
        self._kind, self._sees_ahead = heads.kind, heads.sees_ahead
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        self._decode: TritonDecode | InvariantAttention
        self._prefill: Prefill
        self._with_spans: Prefill
        self._fused: TritonDecode | None = None
        if device.is_invariant:
            self._decode = self._prefill = self._with_spans = InvariantAttention(heads, device, workspace)
            return
        missing, is_wide = missing_for_flashinfer(heads), max(heads.head_dim, heads.value_dim) > MOST_OF_TORCH
        most_tokens = max(max_query_len, PIECE_TOKENS) if missing is not None and is_wide else max_query_len
        decode = TritonDecode(*sizes, most_tokens, device, workspace, heads.value_dim)
        self._decode = self._fused = decode
        # FlashInfer's kernels are causal; images that are seen whole are rare in a step, and correct by torch.
        self._prefill = self._with_spans = SdpaPrefill(heads, block_size, dtype)
        if missing is None:
            entries, where = num_ring_entries, device.torch_device
            self._prefill = FlashInferPrefill(heads, block_size, dtype, kv_dtype, entries, where, space=space())
        elif is_wide:
            self._prefill = PiecewisePrefill(decode, heads, device)
            _LOG.info("prefill attention of these heads runs by the kernel of decode rows: %s", missing)
        else:
            _LOG.warning("prefill attention runs in plain torch, several times slower: %s", missing)

    def plan(self, batch: AttentionBatch, ring_entry: int) -> None:
        """Add the plan of the batch's prefill rows."""
        prefill = self._with_spans if self._sees_ahead and batch.prefill_spans is not None else self._prefill
        batch.plans[self._kind] = partial(prefill.run, prefill.plan(batch, ring_entry))

    def append(
        self, qkv: torch.Tensor, heads: Heads, rope: Rotation, cache: LayerCache, slot_mapping: torch.Tensor
    ) -> None:
        """Write one layer's keys and values."""
        append_heads(qkv, heads, rope, slot_mapping, cache, self._device)

    def run(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        rope: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        out: torch.Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return one layer's output, [T, Hq * Dv], as `dtype` where there are decode rows alone.

        See `raypp.ops.backend.Attention`.
        """
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        is_decode_only = num_decode_tokens == len(qkv) and batch.padded_out is None
        if out is None:
            dtype = dtype if dtype is not None and is_decode_only else qkv.dtype
            out = torch.empty(len(qkv), heads.num_heads * heads.value_dim, dtype=dtype, device=qkv.device)
        out_heads = out.view(len(qkv), heads.num_heads, heads.value_dim)
        if self._fused and num_decode_tokens <= MAX_FUSED_TOKENS and is_decode_only and heads.is_plain:
            self._fused.from_projection(
                qkv,
                heads,
                rope,
                batch.slot_mappings[heads.group],
                cache,
                batch.seq_lens,
                batch.block_tables[heads.group],
                query_len,
                out_heads,
            )
            return out
        q = append_heads(qkv, heads, rope, batch.slot_mappings[heads.group], cache, self._device)
        attend = self._attend_rows if is_decode_only else self._attend_any_rows
        attend(q, heads, cache, batch, out_heads)
        if heads.has_gate:
            gate_heads_(out_heads, qkv, self._device)
        return out

    @break_point
    def _attend_any_rows(
        self, q: torch.Tensor, heads: Heads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend rows whose number and lengths only the host knows: what is launched depends on them."""
        self._attend_rows(q, heads, cache, batch, out)

    def _attend_rows(
        self, q: torch.Tensor, heads: Heads, cache: LayerCache, batch: AttentionBatch, out: torch.Tensor
    ) -> None:
        """Attend the batch's rows, over a cache that has this step's tokens.

        Shapes: q [T or more, Hq, Dk]; out [T or more, Hq, Dv].
        """
        num_rows, query_len = batch.num_decode_rows, batch.decode_query_len
        num_decode_tokens = num_rows * query_len
        if num_rows:
            self._decode(
                q[:num_decode_tokens],
                cache,
                batch.seq_lens[:num_rows],
                batch.block_tables[heads.group][:num_rows],
                query_len,
                heads,
                out[:num_decode_tokens],
            )
        if batch.prefill_query_lens:
            plan = batch.plans.get(heads.kind)
            assert isinstance(plan, partial), "prefill rows need plan_attention"
            tokens = slice(num_decode_tokens, batch.num_tokens)
            plan(q[tokens], cache, heads, out[tokens])
