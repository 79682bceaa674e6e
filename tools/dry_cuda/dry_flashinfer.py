"""FlashInfer's prefill as raypp calls it: its arguments are checked, nothing is computed."""

from __future__ import annotations

from itertools import pairwise

import torch
from dry_tensor import DryTensor, current_tape, is_pinned


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
        logits_soft_cap: float | None = None,
        window_left: int = -1,
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
        starts = _on_host(qo_indptr, "qo_indptr")
        block_starts = _on_host(paged_kv_indptr, "paged_kv_indptr")
        last_lengths = _on_host(paged_kv_last_page_len, "paged_kv_last_page_len")
        lengths = _on_host(seq_lens, "seq_lens")
        assert len(paged_kv_indices) == block_starts[-1], (paged_kv_indices, block_starts)
        assert lengths == [
            (end - start - 1) * page_size + last
            for start, end, last in zip(block_starts, block_starts[1:], last_lengths, strict=False)
        ]
        queries = [end - start for start, end in pairwise(starts)]
        assert max_token_per_sequence == max(queries)
        assert all(query <= length for query, length in zip(queries, lengths, strict=True))
        self._q_shape = (starts[-1], num_qo_heads, head_dim_qk)
        self._types = (q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        keys, values = paged_kv_cache
        assert (k_scale is None) == (v_scale is None) == (keys.dtype == q.dtype), "scales are of a cache in 8 bits"
        assert current_tape() is None, "the work of prefill rows is planned: no graph can hold it"
        assert q.shape == self._q_shape, (q.shape, self._q_shape)
        assert (q.dtype, keys.dtype) == self._types
        assert out is not None
        assert out.shape == q.shape
        assert all(x.is_cuda for x in (q, keys, values, out))
        assert q.stride(-1) == keys.stride(-1) == out.stride(-1) == 1
        assert out.is_contiguous()
        return (out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)) if return_lse else out


class RaggedPrefill:
    """Of `flashinfer.BatchPrefillWithRaggedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert isinstance(float_workspace_buffer, DryTensor)
        assert (kv_layout, backend) == ("NHD", "fa3")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert current_tape() is None, "planned while a graph is recorded"
        assert causal
        starts, key_starts = _on_host(qo_indptr, "qo_indptr"), _on_host(kv_indptr, "kv_indptr")
        lengths = [end - start for start, end in pairwise(key_starts)]
        queries = [end - start for start, end in pairwise(starts)]
        assert all(query <= length for query, length in zip(queries, lengths, strict=True))
        self._q_shape = (starts[-1], num_qo_heads, head_dim_qk)
        self._kv_shape = (key_starts[-1], num_kv_heads, head_dim_qk)
        self._value_dim = head_dim_vo or head_dim_qk
        self._types = (q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert current_tape() is None, "the work of prefill rows is planned: no graph can hold it"
        assert q.shape == self._q_shape, (q.shape, self._q_shape)
        assert k.shape == self._kv_shape, (k.shape, self._kv_shape)
        assert v.shape == (*self._kv_shape[:2], self._value_dim), (v.shape, self._value_dim)
        assert (q.dtype, k.dtype) == (q.dtype, v.dtype) == self._types
        assert out is not None
        assert out.shape == (*q.shape[:2], self._value_dim)
        assert all(x.is_cuda for x in (q, k, v, out))
        assert out.is_contiguous()
        return (out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)) if return_lse else out
