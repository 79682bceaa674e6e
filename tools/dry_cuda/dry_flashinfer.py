"""FlashInfer's two doors, as raypp calls them, and what they insist on."""

from __future__ import annotations

import torch
from dry_tensor import SKIPS, DryTensor, current_tape, is_pinned
from torch.nn.functional import scaled_dot_product_attention


def _on_host(tensor: torch.Tensor, what: str) -> list[int]:
    assert tensor.device.type == "cpu", f"{what} is on the device: planning would wait for it"
    assert tensor.dtype == torch.int32, f"{what} is {tensor.dtype}"
    assert is_pinned(tensor), f"{what} is pageable"
    return tensor.tolist()


class PagedPrefill:
    """Of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert isinstance(float_workspace_buffer, DryTensor)
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        assert current_tape() is None, "planned while a graph is recorded"
        assert paged_kv_indices.is_cuda
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.is_contiguous()
        assert causal
        assert seq_lens is not None
        self._starts = _on_host(qo_indptr, "qo_indptr")
        self._block_starts = _on_host(paged_kv_indptr, "paged_kv_indptr")
        self._last = _on_host(paged_kv_last_page_len, "paged_kv_last_page_len")
        lengths = _on_host(seq_lens, "seq_lens")
        self._blocks = paged_kv_indices.inner.clone()
        assert len(self._blocks) == self._block_starts[-1], (self._blocks, self._block_starts)
        self._lengths = [
            (end - start - 1) * page_size + last
            for start, end, last in zip(self._block_starts, self._block_starts[1:], self._last, strict=False)
        ]
        assert self._lengths == lengths
        queries = [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)]
        assert max_token_per_sequence == max(queries)
        assert all(query <= length for query, length in zip(queries, lengths, strict=True))
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._scale = sm_scale
        self._types = (q_data_type, kv_data_type)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim = self._heads
        assert current_tape() is None, "the work of prefill rows is planned: no graph can hold it"
        assert q.shape == (self._starts[-1], num_heads, head_dim), (q.shape, self._starts)
        assert (q.dtype, keys.dtype) == self._types
        assert out is not None
        assert out.shape == q.shape
        assert all(x.is_cuda for x in (q, keys, values, out))
        assert q.stride(-1) == keys.stride(-1) == out.stride(-1) == 1
        assert out.is_contiguous()
        if SKIPS:
            return out
        for index, length in enumerate(self._lengths):
            blocks = self._blocks[self._block_starts[index] : self._block_starts[index + 1]].long()
            tokens = slice(self._starts[index], self._starts[index + 1])
            k, v = (x.inner[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float() for x in (keys, values))
            query = q.inner[tokens].transpose(0, 1).float()
            num_queries = query.shape[1]
            mask = torch.arange(length) <= torch.arange(length - num_queries, length).unsqueeze(1)
            group = num_heads // num_kv_heads
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            attended = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=self._scale)
            out.inner[tokens] = attended.transpose(0, 1).to(out.dtype)
        return out
