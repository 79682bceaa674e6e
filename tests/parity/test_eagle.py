"""Drafts of EAGLE heads are those of a plain reference, and text does not depend on the head.

Random heads of each kind on random models, 1 to 4 stages, with prompts in chunks, shared beginnings, preemption, KV
blocks in CPU memory, and aborts; steps one by one and recorded. `TEST_EAGLE_CELLS` sets how many cells of the grid
are run: 4 at least, 128 are all.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from drafting import NUM_DRAFTS, Witness, make_requests, run
from eagle_reference import HEADS, ReferenceHead, make_head
from hf_models import make_checkpoint

from raypp.transport.schema import Schema
from raypp.types import SamplingParams

# Checkpoints in float32: of each family, one with tied embeddings and one without.
TARGETS = (("qwen3", 4), ("llama", 4), ("qwen3", 2), ("llama", 2))
CELLS = list(product(HEADS, range(len(TARGETS)), (1, 2, 3, 4), ("none", "full")))
NUM_CELLS = int(os.environ.get("TEST_EAGLE_CELLS", "4"))


def chosen_cells() -> list[tuple[str, int, int, str]]:
    """Return cells of the grid, the first four of which have every kind of head, target and number of stages once."""
    modes = ("full", "none", "none", "full")  # and blocks for all requests in every second cell
    first = [(kind, (i + 1) % len(TARGETS), i + 1, modes[i]) for i, kind in enumerate(HEADS)]
    others = [cell for cell in CELLS if cell not in first]
    return (first + random.Random(0).sample(others, len(others)))[:NUM_CELLS]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_checkpoint(family, seed, tmp_path_factory.mktemp(family), min_layers=4) for family, seed in TARGETS]


def test_drafts_are_those_of_the_reference_and_text_is_that_without_a_head(targets, tmp_path, monkeypatch) -> None:
    met: Counter[str] = Counter()
    plain: dict[tuple[int, int], list[list[int]]] = {}
    cells = chosen_cells()
    for number, (kind, target_index, num_stages, mode) in enumerate(cells):
        target = targets[target_index]
        head = make_head(kind, target, tmp_path / f"head-{number}", seed=number)
        asked = make_requests(128)
        common = {
            "num_stages": num_stages,
            "max_num_batched_tokens": 24,
            "min_prefill_chunk_tokens": 5,
            "mode": mode,
            "num_kv_blocks": (34, 200)[number % 2],
        }
        key = (target_index, num_stages)
        if key not in plain:
            plain[key] = [request.output_token_ids for request in run(target, asked, **common)[0]]
        with monkeypatch.context() as patch:
            witness = Witness(patch)
            method = "eagle" if kind == "eagle" else "eagle3"
            speculative = {"method": method, "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
            memory = {"cpu_kv_bytes": (1 << 22, 0)[number % 2]}
            requests, stats, _ = run(target, asked, speculative=speculative, **common, **memory)
        cell = f"{kind} {TARGETS[target_index]} {num_stages} stages, mode {mode}: {stats}"
        assert [request.output_token_ids for request in requests] == plain[key], cell
        assert stats.num_draft_tokens > stats.num_accepted_tokens, cell
        met += witness.compare(ReferenceHead(head, target))
        met["accepted"] += stats.num_accepted_tokens
        met["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
        met["hits"] += stats.num_prefix_hit_tokens
        met["preemptions"] += stats.num_preemptions
        met["copied back"] += stats.num_blocks_copied_in
    print(f"{len(cells)} cells: {dict(met)}")
    assert met["excused"] <= met["compared"] / 1000
    assert all(met[name] for name in ("compared", "accepted", "rejected", "hits", "preemptions", "copied back")), met


def test_a_wrong_state_is_noticed(targets, tmp_path, monkeypatch) -> None:
    """The comparison above can fail: with two depths exchanged, drafts differ from the reference's."""
    from raypp.stage.step_layers import AuxStates

    gather = AuxStates.gather
    monkeypatch.setattr(AuxStates, "gather", lambda self, *args: gather(self, *args)[::-1])
    head = make_head("eagle3", targets[0], tmp_path / "head")
    witness = Witness(monkeypatch)
    run(
        targets[0],
        make_requests(128)[:5],
        num_stages=2,
        speculative={"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS},
    )
    with pytest.raises(AssertionError):
        witness.compare(ReferenceHead(head, targets[0]))


def test_a_block_is_not_shared_with_a_text_that_goes_on_otherwise(targets, tmp_path) -> None:
    """The head's cache of a block's last position holds the token after the block."""
    head = make_head("eagle3", targets[0], tmp_path / "head")
    common = [7, 8, 9, 10, 11, 12, 13, 14]
    asked = [([*common, ending, 20, 21], SamplingParams(max_tokens=4, temperature=0.0)) for ending in (3, 4, 4)]
    settings = {"speculative": {"method": "eagle3", "model": str(head)}, "max_num_seqs": 1}
    requests, _, engine = run(targets[0], [*asked, *asked[:2]], **settings)
    assert [request.num_cached_tokens for request in requests][:3] == [0, 4, 8]
    without, _, _ = run(targets[0], [*asked, *asked[:2]], max_num_seqs=1)
    assert [request.num_cached_tokens for request in without][:3] == [0, 8, 8]
    assert torch.equal(*(torch.tensor([r.output_token_ids for r in each]) for each in (requests, without)))
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 1


def test_only_rows_that_draft_send_their_states(targets, tmp_path, monkeypatch) -> None:
    """Those of requests of one token, whose blocks nobody shares, do not travel; and the others' drafts are right."""
    head = make_head("eagle3", targets[0], tmp_path / "head", seed=3)
    asked = make_requests(128)[:6]
    for index in (1, 2, 4):
        asked[index] = (asked[index][0], SamplingParams(max_tokens=1, temperature=0.0))
    witness, sizes = Witness(monkeypatch), Counter[str]()
    num_bytes = Schema.num_bytes

    def note(schema, num_rows, num_tokens, num_item_tokens=0, num_drafting_tokens=None):
        if num_drafting_tokens is not None:
            sizes["tokens"] += num_tokens
            sizes["drafting"] += num_drafting_tokens
        return num_bytes(schema, num_rows, num_tokens, num_item_tokens, num_drafting_tokens)

    monkeypatch.setattr(Schema, "num_bytes", note)
    settings = {"num_stages": 3, "enable_prefix_caching": False, "max_num_batched_tokens": 24}
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_DRAFTS}
    run(targets[0], asked, speculative=speculative, min_prefill_chunk_tokens=5, **settings)
    assert 0 < sizes["drafting"] < sizes["tokens"] - 40, sizes
    drafting = [tuple(prompt) for index, (prompt, _) in enumerate(asked) if index not in (1, 2)]
    witness.proposals = [p for p in witness.proposals if any(p.text[: len(prompt)] == prompt for prompt in drafting)]
    assert witness.compare(ReferenceHead(head, targets[0]))["compared"] > 100
