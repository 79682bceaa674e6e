"""Stages of several members against transformers: every family, heads and vocabularies that divide and that do not."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
from drafting import NUM_DRAFTS, Reference, Witness, make_requests, run
from eagle_reference import ReferenceHead, make_head
from exactness import ExactComparison
from hf_models import hf_greedy, load_reference, make_checkpoint, sizes_for_members
from mtp_reference import MtpReference, add_mtp_head, train_mtp_head
from sizes import sized

from raypp.config.engine_config import EngineConfig
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.transport.host.local import LocalSender
from raypp.transport.slices import SliceSender, slice_bytes
from raypp.types import SamplingParams

NUM_NEW_TOKENS = 24


def _compare(path, family, count, num_stages, seed, comparison, *, has_nodes, **others):
    rng = random.Random(seed)
    settings = {
        "num_stages": num_stages,
        "tensor_parallel_size": count,
        "device": "cpu",
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "min_prefill_chunk_tokens": 8,
        "max_model_len": 160,
        "max_num_seqs": 6,
        "num_kv_blocks": 1 + 400 // 8,
        "stage_num_threads": 1,
        **others,
    }
    plan = plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware.of_this_machine())
    engine = LocalEngine(plan, has_nodes=has_nodes)
    prompts = [[rng.randrange(199) for _ in range(rng.randint(1, 50))] for _ in range(5)]

    def generate(prompts, max_tokens):
        params = [SamplingParams(max_tokens=each, temperature=0.0, ignore_eos=True) for each in max_tokens]
        return engine.generate(prompts, params)

    comparison.compare(path, prompts, NUM_NEW_TOKENS, generate)
    return plan


def _full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.in_ci("qwen3-2-2", "qwen3_5_moe-2-2", "minimax_m2-2-2", "gemma4_moe-2-2", "deepseek_v3-2-2")
@pytest.mark.parametrize(("count", "num_stages"), [(2, 2), *map(_full, (2, 3, 4, 4, 3), (1, 2, 1, 3, 1))])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_moe",
        "qwen3_5_moe",
        "minimax_m2",
        "gemma3",
        "gemma4_moe",
        "deepseek_v3",
        *map(_full, ("deepseek_v2", "glm4_moe_lite", "mistral4")),
        *map(_full, ("llama", "qwen2", "mixtral", "glm4_moe", "mistral", "ministral", "gpt_oss", "gemma2", "gemma4")),
        *map(_full, ("qwen3_5", "qwen3_next", "ministral3")),
    ],
)
def test_tokens_equal_transformers(family, count, num_stages, tmp_path):
    comparison = ExactComparison()
    for seed in sized((1,), range(4)):
        path = make_checkpoint(
            family, seed, tmp_path / f"{seed}", min_layers=max(2, num_stages), **sizes_for_members(family, count, seed)
        )
        _compare(path, family, count, num_stages, seed, comparison, has_nodes=bool(seed % 2))
    comparison.assert_rare()


UNEVEN: dict[str, dict] = {  # sizes of experts that three do not divide
    "qwen3_moe": {"moe_intermediate_size": 40, "num_experts": 12},
    "gpt_oss": {"intermediate_size": 40, "num_local_experts": 12},
    "qwen3_5_moe": {"moe_intermediate_size": 40, "num_experts": 12},
}
EVEN: dict[str, dict] = {
    "deepseek_v3": {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "glm4_moe": {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 2},
    "gemma4_moe": {"num_experts": 12},
    "mixtral": {"num_local_experts": 12},
}


WHOLE = [*product(("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"), [(3, 2)]), ("qwen3_moe", (2, 1))]
MORE_WHOLE = [each for each in product([*UNEVEN, *EVEN], [(3, 2), (2, 1), (2, 2), (4, 1), (4, 2)]) if each not in WHOLE]


@pytest.mark.in_ci("gpt_oss-size1", "deepseek_v3-size2")
@pytest.mark.parametrize(("family", "size"), [*WHOLE, *(_full(*each) for each in MORE_WHOLE)])
def test_tokens_of_whole_experts_equal_transformers(family, size, tmp_path):
    """Members have whole experts by themselves where parts would not divide, and where they are asked to."""
    count, num_stages = size
    is_chosen = family in UNEVEN and count == 3
    comparison, more = ExactComparison(), {} if is_chosen else {"enable_expert_parallel": True}
    for seed in sized((1,), range(4)):
        sizes = sizes_for_members(family, count, seed) | UNEVEN.get(family, {}) | EVEN.get(family, {})
        path = make_checkpoint(family, seed, tmp_path / f"{seed}", min_layers=max(2, num_stages), **sizes)
        plan = _compare(path, family, count, num_stages, seed, comparison, has_nodes=bool(seed % 2), **more)
        assert plan.model.experts.num_parts == count
    comparison.assert_rare()


HEADS = [("eagle", 2, 1), ("eagle3_own_vocabulary", 2, 2), ("mtp", 2, 2), ("mtp_layer", 2, 1), ("mtp_latents", 2, 2)]
MORE_HEADS = [
    ("eagle", 4, 2),
    ("eagle3", 2, 1),
    ("eagle3", 4, 3),
    ("eagle3_qwen", 2, 2),
    ("mtp", 4, 1),
    ("mtp", 3, 2),
    ("mtp_whole", 3, 2),
]


def _with_head(kind: str, count: int, path: Path) -> tuple[Path, dict, Reference]:
    """Return a random model, the speculation by a random head of a kind, and the reference of the two."""
    with_mtp = {"mtp_layer": ("glm4_moe", 0), "mtp_latents": ("deepseek_v3", 0)}
    method = kind.partition("_")[0]
    family = with_mtp.get(kind, ("qwen3_5_moe", 8) if method == "mtp" else ("qwen3", 4))
    more = {"num_experts": 12} if kind == "mtp_whole" else {}
    target = make_checkpoint(
        *family, path / "model", min_layers=4, **sizes_for_members(family[0], count, count), **more
    )
    if method == "mtp":
        add_mtp_head(target, count)
        load_reference.cache_clear()
        return target, {"method": method}, MtpReference(target)
    head = make_head(kind, target, path / "head", seed=count, head_multiple=count)
    return target, {"method": method, "model": str(head)}, ReferenceHead(head, target)


@pytest.mark.in_ci("mtp_latents-2-2", "eagle3_own_vocabulary-2-2")
@pytest.mark.parametrize(("kind", "count", "num_stages"), [*HEADS, *(_full(*each) for each in MORE_HEADS)])
def test_drafts_of_heads_are_those_of_the_reference(kind, count, num_stages, tmp_path, monkeypatch):
    """All members propose the same; the text is that without a head."""
    target, speculative, reference = _with_head(kind, count, tmp_path)
    asked, witness = make_requests(128), Witness(monkeypatch)
    common = {"num_stages": num_stages, "tensor_parallel_size": count, "num_kv_blocks": 60}
    common |= {"max_num_batched_tokens": 24, "min_prefill_chunk_tokens": 5}
    common |= {"mode": "full" if num_stages == 2 else "none", "has_nodes": num_stages > 1}
    common |= {"enable_expert_parallel": True} if kind == "mtp_whole" else {}
    plain = [request.output_token_ids for request in run(target, asked, **common)[0]]
    requests, stats, _ = run(target, asked, speculative=speculative | {"num_speculative_tokens": NUM_DRAFTS}, **common)
    assert [request.output_token_ids for request in requests] == plain
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    texts = sorted((proposal.text, proposal.drafts) for proposal in witness.proposals)
    assert all(texts[index : index + count] == [texts[index]] * count for index in range(0, len(texts), count))
    met = witness.compare(reference)
    assert met["compared"] > 100
    assert met["excused"] <= met["compared"] / 1000


def _accepted(target, asked, speculative, **settings):
    """Return the texts, and how many drafts were accepted of each request by position."""
    fixed = {"max_model_len": 256, "num_kv_blocks": 400}
    given = speculative | {"num_speculative_tokens": NUM_DRAFTS}
    requests, stats, _ = run(target, asked, speculative=given, **(fixed | settings))
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 5
    return [(request.output_token_ids, request.draft_counts.accepted_by_position) for request in requests]


def _greedy(prompts):
    return [(prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)) for prompt in prompts]


@pytest.mark.parametrize("num_stages", [2, _full(1)])
def test_as_many_drafts_of_a_trained_head_are_accepted_as_by_one_member(num_stages):
    rng = random.Random(0)
    asked = _greedy([[rng.randrange(2, 400) for _ in range(20)] for _ in range(6)])
    head = {"method": "eagle3", "model": "tiny-eagle3"}
    found = [_accepted("tiny", asked, head, num_stages=num_stages, tensor_parallel_size=count) for count in (1, 2)]
    assert found[0] == found[1]


@pytest.mark.full
def test_as_many_drafts_of_the_models_own_trained_head_are_accepted_as_by_one_member(tmp_path):
    target, _, _ = _with_head("mtp", 2, tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 128) for _ in range(6)] for _ in range(12)]
    texts = [prompt + hf_greedy(target, prompt, 40)[0] for prompt in prompts]
    train_mtp_head(target, texts, num_steps=100)
    load_reference.cache_clear()
    cells = [(1, 1), (1, 2), (2, 2)]
    found = [
        _accepted(target, _greedy(prompts), {"method": "mtp"}, num_stages=stages, tensor_parallel_size=count)
        for stages, count in cells
    ]
    assert found == [found[0]] * len(cells)
    assert [text for text, _ in found[0]] == [text[6:] for text in texts]


class _Counted:
    """What members send to the next stage: by edge and step, the bytes of each and the message that all have."""

    def __init__(self, monkeypatch):
        self.sizes, self.messages = defaultdict(list), {}
        lock, send_slice, send = threading.Lock(), SliceSender.send, LocalSender.send
        counted = self

        def sliced(end, step_id, num_bytes):
            message = bytes(end.slots[0, :num_bytes].numpy())
            with lock:
                assert counted.messages.setdefault(step_id, message) == message, "members differ"
            send_slice(end, step_id, num_bytes)

        def sent(end, step_id, num_bytes):
            with lock:
                counted.sizes[step_id].append(num_bytes)
            send(end, step_id, num_bytes)

        monkeypatch.setattr(SliceSender, "send", sliced)
        monkeypatch.setattr(LocalSender, "send", sent)


@pytest.mark.in_ci("full_and_piecewise-2")
@pytest.mark.parametrize(
    ("mode", "count"),
    [("none", 4), ("full_and_piecewise", 2), _full("none", 2), _full("full_and_piecewise", 4)],
)
def test_members_on_two_nodes_send_a_message_once(count, mode, monkeypatch):
    """Chunked prompts, n-grams and preemption; the tokens are those of one member, the bytes those of one message."""
    settings = {"num_stages": 2, "stage_num_threads": 1, "mode": mode, "block_size": 8, "num_kv_blocks": 40}
    settings |= {"max_num_seqs": 6, "max_model_len": 160, "max_num_batched_tokens": 40, "min_prefill_chunk_tokens": 5}
    settings |= {"speculative": {"method": "ngram", "num_speculative_tokens": 3}}
    rng = random.Random(count)
    prompts = [[rng.randrange(2, 400)] * 3 + [rng.randrange(2, 400) for _ in range(each)] for each in (1, 90, 33, 60)]
    params, found = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True), {}
    for name, number, has_nodes in (("one", 1, False), ("one node", count, False), ("two nodes", count, True)):
        config = EngineConfig.from_flat("tiny", tensor_parallel_size=number, **settings)
        plan, counted = plan_engine(config, Hardware(1)), _Counted(monkeypatch)
        engine = LocalEngine(plan, has_nodes=has_nodes)
        found[name] = engine.generate(prompts, params), counted
        monkeypatch.undo()
        stats = engine.stats()
        assert stats.num_preemptions
        assert stats.num_accepted_tokens
    tokens, _ = found["one"]
    assert all(each == tokens for each, _ in found.values())
    (_, one_node), (_, two_nodes) = found["one node"], found["two nodes"]
    assert not one_node.messages
    assert two_nodes.messages.keys() == two_nodes.sizes.keys() == one_node.sizes.keys()
    for step_id, message in two_nodes.messages.items():
        # Of members of two stages: whole messages and feedback on one node, slices and feedback on two.
        feedback = [size for size in two_nodes.sizes[step_id] if size != slice_bytes(len(message), count)]
        assert sorted(one_node.sizes[step_id]) == sorted([*feedback, *[len(message)] * count])
        assert len(feedback) == count
        assert slice_bytes(len(message), count) * count < len(message) + 16 * count
    print(f"\n{len(tokens)} texts, {len(two_nodes.messages)} steps")
