"""Attention over latents against its twin, on a GPU or, where there is none, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from kernel_checks import DEVICE, IS_GPU, Kernels, poison

from raypp.ops.attention import AttentionBatch, Heads, LatentHeads, Rotation, apply_rotary, rotation
from raypp.ops.cpu.torch_kernels import TorchLatentAttention
from raypp.ops.cuda.heads import rotation_table
from raypp.ops.cuda.latent_attention import CudaLatentAttention
from raypp.ops.cuda.latent_kernels import LatentTuning, TritonLatents
from raypp.ops.cuda.step_attention import PrefillSpace
from raypp.ops.kv_cache import FP8, LayerCache

Sizes = tuple[int, int, int, int, int]
"""Heads, elements of a key that are not rotated, that are, of a latent, and of a value."""


def made_latents(kernels: Kernels, sizes: Sizes, *, scale: float = 1.0, has_neighbours: bool = True) -> LatentHeads:
    """Return random weights; `scale` is that of a cache in 8 bits."""
    num_heads, key_dim, rotary_dim, rank, value_dim = sizes
    heads = Heads(
        num_heads,
        1,
        rank + rotary_dim,
        k_scale=scale,
        v_scale=scale,
        v_dim=rank,
        scale=(key_dim + rotary_dim) ** -0.5,
        rotary_dim=rotary_dim,
        has_latents=True,
    )
    expand = kernels.normal(num_heads, key_dim + value_dim, rank, scale=rank**-0.5)
    return LatentHeads(heads, expand, value_dim, kernels.normal(rank), 1e-6, has_neighbours)


def made_batch(
    kernels: Kernels, decode_lens: Sequence[int], query_len: int, prefill: Sequence[tuple[int, int]], block_size: int
) -> tuple[AttentionBatch, torch.Tensor, int]:
    """Return decode rows of some lengths and prefill rows (tokens, length), positions, and the number of blocks.

    The null block ends each table.
    """
    lens = [*decode_lens, *(length for _, length in prefill)]
    counts = [query_len] * len(decode_lens) + [count for count, _ in prefill]
    width = -(-max(lens) // block_size) + 1
    blocks = kernels.rng.sample(range(1, 1 + width * len(lens)), width * len(lens))
    tables = torch.tensor(blocks, dtype=torch.int32).view(len(lens), width)
    tables[:, -1] = 0
    places = [(row, at) for row, (n, length) in enumerate(zip(counts, lens, strict=True)) for at in range(n, 0, -1)]
    positions = [max(0, lens[row] - at) for row, at in places]
    slots = [
        int(tables[row, position // block_size]) * block_size + position % block_size if lens[row] else 0
        for (row, _), position in zip(places, positions, strict=True)
    ]
    batch = AttentionBatch(
        num_decode_rows=len(decode_lens),
        decode_query_len=query_len,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        block_tables=[tables.to(DEVICE)],
        slot_mappings=[torch.tensor(slots, dtype=torch.int64, device=DEVICE)],
        prefill_query_lens=[count for count, _ in prefill],
        prefill_seq_lens=[length for _, length in prefill],
    )
    return batch, torch.tensor(positions, device=DEVICE), 1 + len(blocks)


def check_latents(
    dtype: torch.dtype,
    sizes: Sizes,
    decode_lens: Sequence[int],
    query_len: int = 1,
    prefill: Sequence[tuple[int, int]] = (),
    *,
    tuning: LatentTuning | None = None,
    block_size: int = 16,
    scale: float | None = None,
    has_neighbours: bool = True,
    in_columns: bool = False,
) -> None:
    """A step of decode and prefill rows over a cache of which all that no row owns is no number.

    Rows of length 0 are padding of full graphs. `scale`: of a cache in 8 bits; `in_columns`: whether queries and
    latents are columns of one product.
    """
    kernels = Kernels(dtype, seed=len(decode_lens) + query_len)
    num_heads, key_dim, rotary_dim, rank, _ = sizes
    latents = made_latents(kernels, sizes, scale=scale or 1.0, has_neighbours=has_neighbours)
    batch, positions, num_blocks = made_batch(kernels, decode_lens, query_len, prefill, block_size)
    lens, num_tokens = batch.seq_lens.tolist(), len(positions)
    cache = LayerCache(
        kernels.normal(num_blocks, 1, block_size, rotary_dim), kernels.normal(num_blocks, 1, block_size, rank)
    )
    poison(cache, lens, batch.block_tables[0])
    if scale is not None:
        cache = LayerCache(*(side.float().div(scale).clamp(-448, 448).to(FP8) for side in cache))
    width = num_heads * (key_dim + rotary_dim)
    product = kernels.normal(num_tokens, width + rank + rotary_dim)
    projected = product.split((width, rank + rotary_dim), 1)
    if not in_columns:
        projected = tuple(part.contiguous() for part in projected)
    frequencies = (1.0 / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)).to(DEVICE)

    exact = replace(latents, expand=latents.expand.float(), norm_weight=latents.norm_weight.float())
    own_lens = [max(length, query_len) for length in lens]  # of padding rows nothing is read
    twin_batch = replace_lens(batch, own_lens)
    exact_cache = LayerCache(*(side.clone() if side.dtype == FP8 else side.float() for side in cache))
    by = rotation(positions, frequencies, torch.float32)
    expected = TorchLatentAttention(exact)(tuple(part.float() for part in projected), by, exact_cache, twin_batch)

    attention = CudaLatentAttention(
        latents,
        block_size=block_size,
        dtype=dtype,
        max_query_len=query_len,
        num_ring_entries=1,
        device=kernels.device,
        workspace=kernels.workspace,
        space=lambda: PrefillSpace(DEVICE),
    )
    kernels.workspace.reserve(1 << 25)
    if prefill:
        attention.plan(batch, 0)
    table = rotation_table(positions, frequencies, kernels.device)
    got = attention.run(tuple(part.clone() for part in projected), latents, table, cache, batch, None)
    used = torch.tensor([lens[row] > 0 for row in range(len(decode_lens)) for _ in range(query_len)], dtype=torch.bool)
    used = torch.cat((used, torch.ones(num_tokens - len(used), dtype=torch.bool))).to(DEVICE)
    if scale is not None:  # what was rounded otherwise is attended to as it is
        expected = expanded_attention(projected[0].float(), exact, by, cache, batch, scale)
    kernels.assert_close(got[used], expected.to(dtype)[used], 4)
    for side, expected_side in zip(cache, exact_cache, strict=True):
        rows = batch.slot_mappings[0][used]
        written = side.view(-1, side.shape[-1]).float()[rows], expected_side.view(-1, side.shape[-1]).float()[rows]
        rounding = 0.13 if scale is not None else 2e-2 if dtype != torch.float32 else 1e-5
        rounding = 0.51 if scale is not None and not IS_GPU else rounding  # see `Kernels.assert_narrowed`
        torch.testing.assert_close(*written, atol=rounding, rtol=rounding)
    queries, apart = projected[0].clone(), LayerCache(*(torch.zeros_like(side) for side in cache))
    attention.append(projected, latents, table, apart, batch.slot_mappings[0])  # as a head that drafts does
    assert torch.equal(queries, projected[0])
    for side, appended in zip(cache, apart, strict=True):
        one, other = (each.view(-1, each.shape[-1])[batch.slot_mappings[0][used]] for each in (side, appended))
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if tuning is not None and decode_lens:
        _check_cut(kernels, latents, projected[0], cache, batch, tuning, query_len)


def expanded_attention(
    queries: torch.Tensor, latents: LatentHeads, by: Rotation, cache: LayerCache, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Return the output over keys and values that are expanded from what a cache holds, [T, Hq * Dv], in float32.

    Shapes: queries [T, Hq * (N + R)], not rotated.
    """
    key_dim, heads = latents.key_dim, queries.unflatten(1, (latents.heads.num_heads, -1))
    ends = heads[:, :, key_dim:]
    if latents.has_neighbours:
        ends = ends.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
    ends = apply_rotary(ends, by)
    if latents.has_neighbours:
        ends = ends.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
    heads = torch.cat((heads[:, :, :key_dim], ends), 2)
    counts = [batch.decode_query_len] * batch.num_decode_rows + batch.prefill_query_lens
    outputs = []
    rows = zip(heads.split(counts), batch.block_tables[0].long(), batch.seq_lens.tolist(), strict=True)
    for q, table, length in rows:
        keys, values = (side.float()[table, 0].flatten(0, 1)[:length] * scale for side in cache)
        expanded = torch.einsum("hdl,tl->htd", latents.expand, values)
        k = torch.cat((expanded[:, :, :key_dim], keys.expand(q.shape[1], -1, -1)), 2)
        behind = torch.arange(length - len(q), length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
        scores = torch.einsum("qhd,htd->hqt", q, k) * latents.heads.scale
        weights = scores.masked_fill(behind < 0, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqt,htd->qhd", weights, expanded[:, :, key_dim:]).flatten(1))
    return torch.cat(outputs)


def replace_lens(batch: AttentionBatch, lens: list[int]) -> AttentionBatch:
    """Return a batch whose rows have other lengths."""
    of_rows = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return AttentionBatch(
        batch.num_decode_rows,
        batch.decode_query_len,
        of_rows,
        batch.block_tables,
        batch.slot_mappings,
        batch.prefill_query_lens,
        batch.prefill_seq_lens,
    )


def _check_cut(
    kernels: Kernels,
    latents: LatentHeads,
    queries: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    tuning: LatentTuning,
    query_len: int,
) -> None:
    """Another cut finds the same."""
    decode = TritonLatents(latents, query_len, kernels.device, kernels.workspace)
    num_tokens = batch.num_decode_rows * query_len
    heads = queries[:num_tokens].unflatten(1, (latents.heads.num_heads, -1))
    absorbed = torch.bmm(heads[:, :, : latents.key_dim].transpose(0, 1), latents.expand[:, : latents.key_dim])
    rows = slice(0, batch.num_decode_rows)
    step = (cache, batch.seq_lens[rows], batch.block_tables[0][rows], query_len, latents)
    ends = heads[:, :, latents.key_dim :]
    kernels.assert_close(decode.attend(absorbed, ends, *step, tuning), decode.attend(absorbed, ends, *step), 2)
