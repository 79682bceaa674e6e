"""Speculation on a GPU: the kernels on real sizes, and inside a CUDA graph that is replayed for other lengths."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from raypp.ops.cuda.ngram_kernel import NgramKernel
from raypp.ops.cuda.verify_kernels import verify_and_append
from raypp.ops.ngram import propose_ngrams
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.specdec.draft_tables import verify_drafts

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("num_rows", "window", "extra"), [(1, 32768, 0), (64, 4096, 16), (256, 5000, 8), (256, 32768, 16)]
)
@pytest.mark.parametrize("vocab_size", [2, 300, 150_000])
def test_ngrams_are_those_of_the_twin(num_rows, window, extra, vocab_size):
    generator = torch.Generator(device=CUDA).manual_seed(window + vocab_size)
    shape = (num_rows + 1, window + extra)
    tokens = torch.randint(0, vocab_size, shape, dtype=torch.int32, device=CUDA, generator=generator)
    rows = torch.randperm(num_rows + 1, device=CUDA)[:num_rows]
    kernel = NgramKernel(tokens, window=window, min_n=2, max_n=5, num_drafts=8, max_rows=num_rows)
    for _ in range(5):
        lengths = torch.randint(1, int(window * 1.5), (num_rows,), device=CUDA, generator=generator)
        got = kernel(rows, lengths)
        expected = propose_ngrams(
            tokens, rows, lengths, window=window, min_n=2, max_n=5, num_drafts=8, max_length=int(lengths.max())
        )
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_a_graph_follows_the_tables():
    """One step's verification, memory and proposal are captured once, and replayed while the text grows."""
    num_rows, window, width, num_drafts = 33, 4096, 4112, 4
    generator = torch.Generator(device=CUDA).manual_seed(0)

    def random(*shape: int, high: int = 3) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.int32, device=CUDA, generator=generator)

    table, reference = RowTokens(64, width, CUDA), RowTokens(64, width, CUDA)
    table.table.copy_(random(64, width))
    reference.table.copy_(table.table)
    rows = torch.randperm(64, device=CUDA)[:num_rows]
    draft_ids, limits = random(64, num_drafts), torch.full((64,), window, dtype=torch.int32, device=CUDA)
    num_proposed = random(64, high=2) * num_drafts
    lengths = torch.randint(1, 3000, (num_rows,), device=CUDA, generator=generator)
    chosen = random(num_rows, 1 + num_drafts)
    kernel = NgramKernel(table.table, window=window, min_n=2, max_n=5, num_drafts=num_drafts, max_rows=num_rows)

    def step() -> torch.Tensor:
        num_valid, *_, new_lengths = verify_and_append(
            chosen, rows, lengths, draft_ids, num_proposed, limits, table.table
        )
        drafts, proposed = kernel(rows, new_lengths)
        draft_ids.index_copy_(0, rows, drafts)
        num_proposed.index_copy_(0, rows, proposed)
        lengths.copy_(new_lengths)
        return num_valid

    stream = torch.cuda.Stream()
    saved = [tensor.clone() for tensor in (table.table, draft_ids, num_proposed, lengths)]
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        num_valid = step()
    for tensor, value in zip((table.table, draft_ids, num_proposed, lengths), saved, strict=True):
        tensor.copy_(value)
    accepted = 0
    for _ in range(40):
        chosen.copy_(random(num_rows, 1 + num_drafts))
        before, drafts, proposed = lengths.clone(), draft_ids[rows], num_proposed[rows]
        room = limits[rows] - before.to(torch.int32)
        expected = verify_drafts(chosen, before, drafts, proposed, room)
        reference.write(StepTokens(rows, before, chosen))
        next_drafts = propose_ngrams(
            reference.table,
            rows,
            expected.lengths,
            window=window,
            min_n=2,
            max_n=5,
            num_drafts=num_drafts,
            max_length=window,
        )
        graph.replay()
        assert torch.equal(num_valid, expected.num_valid)
        assert torch.equal(lengths, expected.lengths)
        assert torch.equal(table.table, reference.table)
        assert torch.equal(draft_ids[rows], next_drafts[0])
        assert torch.equal(num_proposed[rows], next_drafts[1])
        accepted += int((num_valid - 1).sum())
    assert accepted > 0
