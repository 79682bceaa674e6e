"""The kernels of speculation against their twins: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import random

import pytest
import torch
from ngram_oracle import ngram_oracle, ring_table

from raypp.ops.cuda import verify_kernels
from raypp.ops.cuda.ngram_kernel import NgramKernel
from raypp.ops.cuda.verify_kernels import verify_and_append
from raypp.ops.row_tokens import RowTokens, StepTokens
from raypp.ops.sample.tables import FREE, PositionMasks, StepMasks, hold
from raypp.specdec.draft_tables import verify_drafts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("window", "extra"), [(16, 0), (80, 9), (2064, 0), (4100, 12)])
def test_ngrams_are_those_of_the_oracle(window, extra):
    rng = random.Random(window)
    for _ in range(4):
        num_rows, min_n = rng.randint(1, 4), rng.randint(1, 4)
        max_n, num_drafts = rng.randint(min_n, 6), rng.randint(1, 9)
        vocab_size = rng.choice([2, 3, 40])
        lengths = [rng.randint(1, int(window * 1.6)) for _ in range(num_rows)]
        texts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
        rows = rng.sample(range(num_rows + 2), num_rows)
        table = ring_table(texts, rows, num_rows + 2, window + extra).to(DEVICE)
        kernel = NgramKernel(
            table, window=window, min_n=min_n, max_n=max_n, num_drafts=num_drafts, max_rows=num_rows + 1
        )
        expected = [ngram_oracle(text, window, min_n, max_n, num_drafts) for text in texts]
        for _ in range(2):  # every launch leaves the scratch as the next one needs it
            # The last row is padding: it has no tokens, and gets ids of which none counts.
            drafts, num_proposed = kernel(
                torch.tensor([*rows, 0], device=DEVICE), torch.tensor([*lengths, 0], device=DEVICE)
            )
            assert drafts.tolist()[:-1] == [ids for ids, _ in expected]
            assert num_proposed.tolist() == [num_drafts * is_match for _, is_match in expected] + [0]


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5, 8])
def test_verification_is_that_of_its_twin(num_drafts):
    rng, num_rows, width, max_drafts = random.Random(num_drafts), 7, 32, 8

    def int32s(*shape: int, values: range) -> torch.Tensor:
        flat = [rng.choice(values) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(flat, dtype=torch.int32, device=DEVICE).view(shape)

    for _ in range(5):
        rows = torch.tensor(rng.sample(range(num_rows), 5), device=DEVICE)
        # As of a step, where these are the positions of every row's first token among all.
        first = int32s(5, 1 + num_drafts, values=range(1, 90)).to(torch.int64)[:, 0]
        chosen = int32s(5, 1 + num_drafts, values=range(2))
        draft_ids, limits = int32s(num_rows, max_drafts, values=range(2)), int32s(num_rows, values=range(1, 99))
        num_proposed = int32s(num_rows, values=range(0, max_drafts + 1, max_drafts))
        tables = RowTokens(num_rows, width, DEVICE), RowTokens(num_rows, width, DEVICE)
        for table in tables:
            table.table.fill_(9)
        got = verify_and_append(chosen, rows, first, draft_ids, num_proposed, limits, tables[0].table)
        room = limits[rows] - first.to(torch.int32)
        expected = verify_drafts(chosen, first, draft_ids[rows], num_proposed[rows], room)
        tables[1].write(StepTokens(rows, first, chosen))
        wanted = (expected.num_valid, expected.num_drafted, expected.num_matched, expected.lengths)
        for values, right in zip(got, wanted, strict=True):
            assert values.dtype == right.dtype
            assert values.tolist() == right.tolist()
        assert torch.equal(tables[0].table, tables[1].table)


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5, 8])
def test_rows_are_held_to_their_masks_as_by_the_twin(num_drafts):
    rng, num_rows, max_drafts = random.Random(num_drafts), 9, 8

    def int32s(*shape: int, values: range) -> torch.Tensor:
        flat = [rng.choice(values) for _ in range(torch.Size(shape).numel())]
        return torch.tensor(flat, dtype=torch.int32, device=DEVICE).view(shape)

    for _ in range(8):
        rows = torch.tensor(rng.sample(range(num_rows), 7), device=DEVICE)
        first = int32s(7, 1 + num_drafts, values=range(3, 6)).to(torch.int64)[:, 0]
        token_ids, draft_ids = int32s(7, 1 + num_drafts, values=range(50)), int32s(num_rows, 8, values=range(2))
        num_valid, counts = int32s(7, values=range(1, 2 + num_drafts)), int32s(2, 7, values=range(1, 9))
        last = int32s(num_rows, 5, values=range(50, 99))
        nothing = PositionMasks(rows, rows)
        mask_drafts = int32s(7, max_drafts, values=range(2))[:, :num_drafts]
        num_masks, positions = int32s(7, values=range(FREE, 2 + num_drafts)), int32s(7, values=range(3, 6))
        outcomes = []
        for program in (hold, verify_kernels.hold):
            masks = StepMasks(num_masks, positions, mask_drafts, nothing)
            drafts = draft_ids if num_drafts else None
            compared = tuple(counts.clone()) if num_drafts else ()
            tokens = StepTokens(rows, first, token_ids.clone(), num_valid.clone(), None, *compared)
            lengths = program(tokens, masks, last, drafts)
            assert lengths.dtype == torch.int64
            outcomes.append([lengths, tokens.token_ids, tokens.num_valid, *compared])
        for of_twin, of_kernel in zip(*outcomes, strict=True):
            assert of_kernel.tolist() == of_twin.tolist()
