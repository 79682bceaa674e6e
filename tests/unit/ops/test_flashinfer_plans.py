"""What FlashInfer is given of prefill rows, by a stand-in that does what its documentation says, in plain torch."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import kernel_checks as checks
import pytest
import torch

from raypp.ops.cuda import step_attention
from raypp.ops.cuda.step_attention import FlashInferPrefill

BLOCK_SIZE = 4


class StandIn:
    """A wrapper of paged KV: rows of blocks, queries that are their rows' last tokens, LSE to the base of 2."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "HND"

    def plan(self, query_starts, block_starts, blocks, last_lens, *sizes, **settings) -> None:
        self.rows = query_starts.tolist(), block_starts.tolist(), blocks.long(), last_lens.tolist()
        self.sizes, self.settings = sizes, settings

    def run(self, q, kv, out, return_lse=False):
        query_starts, block_starts, blocks, last_lens = self.rows
        num_heads, num_kv_heads, _, block_size = self.sizes
        settings, sums = self.settings, torch.empty(len(q), num_heads)
        for row, last_len in enumerate(last_lens):
            own = blocks[block_starts[row] : block_starts[row + 1]]
            length = (len(own) - 1) * block_size + last_len
            assert length == settings["seq_lens"][row]
            keys, values = (
                side[own].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(num_heads // num_kv_heads, 1)
                for side in kv
            )
            tokens = slice(query_starts[row], query_starts[row + 1])
            scores = torch.einsum("qhd,khd->hqk", q[tokens], keys) * settings["sm_scale"]
            if settings["logits_soft_cap"]:
                scores = settings["logits_soft_cap"] * torch.tanh(scores / settings["logits_soft_cap"])
            behind = torch.arange(length - scores.shape[1], length)[:, None] - torch.arange(length)
            hidden = behind < 0
            if settings["window_left"] >= 0:
                hidden |= behind > settings["window_left"]
            scores = scores.masked_fill(hidden, -torch.inf)
            sums[tokens] = (scores.logsumexp(-1) / math.log(2)).t()
            out[tokens] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)  # all that it is given is read
        return (out, sums) if return_lse else out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = library.BatchPrefillWithRaggedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(step_attention, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(step_attention, "_on_host", lambda values: torch.tensor(values, dtype=torch.int32))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 6}, {"window": 1, "has_sinks": True}, {"has_sinks": True, "soft_cap": 2.0}, {"window": 100}],
    ids=str,
)
def test_what_flashinfer_is_given(settings: dict) -> None:
    """Stale blocks, which hold no numbers, are not among it."""
    kernels = checks.Kernels(torch.float32)
    heads = checks.made_heads(4, 2, 64, **settings)
    batch, cache = checks.prefill_batch(kernels, [(7, 7), (3, 30), (1, 9), (12, 33)], heads, BLOCK_SIZE)
    q = kernels.normal(sum(batch.prefill_query_lens), heads.num_heads, heads.head_dim)
    sizes = BLOCK_SIZE, torch.float32, torch.float32, 1, torch.device("cpu")
    prefill = FlashInferPrefill(heads, *sizes, least_queries=math.inf)
    out = torch.full_like(q, torch.nan)
    prefill.run(prefill.plan(batch, 0), q, cache, heads, out)
    by_torch = step_attention.SdpaPrefill(heads, BLOCK_SIZE, torch.float32)
    expected = torch.empty_like(q)
    by_torch.run(by_torch.plan(batch, 0), q, cache, heads, expected)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
