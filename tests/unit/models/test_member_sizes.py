"""What a member of a stage holds is what the plan says, within 3 %: weights, a draft head's, KV cache, states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from eagle_reference import HEADS, make_head
from hf_models import make_checkpoint
from quantized_tensors import CONFIGS

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.models.weights import CheckpointWeights
from raypp.ops.cpu.torch_kernels import TorchKernels
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.stage_memory import stage_weight_bytes
from raypp.stage import build_stage
from raypp.stage.speculation import Speculation
from raypp.stage.stage_spec import StageSpec

MOST = 0.03
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 1024,
    "vocab_size": 2001,
}
STATES = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
DENSE_STATES = {name: size for name, size in STATES.items() if "expert" not in name and "moe" not in name}
KINDS = ["sliding_attention", "full_attention"] * 2
WIDE = {"global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "layer_types": KINDS}
CASES = {
    "dense": ("qwen3", 0, {}),
    "tied": ("qwen3", 1, {"tie_word_embeddings": True}),
    "biases": ("llama", 2, {"mlp_bias": True, "attention_bias": True}),
    "experts": ("qwen3_moe", 0, EXPERTS),
    "some dense layers": ("qwen3_moe", 0, {**EXPERTS, "mlp_only_layers": [1]}),
    "sinks and pairs": ("gpt_oss", 3, {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256}),
    "norms behind": ("gemma3", 0, {}),
    "values that are keys": ("gemma4", 0, WIDE),
    "an MLP beside experts": ("gemma4_moe", 0, {**WIDE, "moe_intermediate_size": 256, "num_experts": 8}),
    "shared experts": ("glm4_moe", 0, {"moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2}),
    "a norm of all heads": ("minimax_m2", 0, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "states": ("qwen3_5", 0, DENSE_STATES),
    "states and experts": ("qwen3_next", 0, STATES),
}
FORMS = {
    "fp8 blocks": {**CONFIGS["fp8 blocks"], "weight_block_size": [128, 128]},
    "compressed fp8 channel": CONFIGS["compressed fp8 channel"],
    "awq": {**CONFIGS["awq"], "group_size": 64},
    "gptq order": {**CONFIGS["gptq order"], "group_size": 64},
    "mxfp4": CONFIGS["mxfp4"],
    "int8 channel": CONFIGS["int8 channel"],
}


@dataclass
class _Kept:
    """Stands for a product, and holds what it is given as it is."""

    parts: tuple[Any, ...]

    def in_float32(self) -> None: ...


class KeepingKernels(TorchKernels):
    """Products keep their weights in the checkpoint's form, as a GPU's do."""

    def linear(self, *parts: Any) -> Any:
        return _Kept(parts)

    def chosen_experts(self, weights: Any) -> Any:
        return _Kept((weights,))


class OneOfMembers:
    """A member that does not compute."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("weights are read, and nothing is computed")

    gathered = from_first = sum_


def _below(thing: Any) -> Iterator[Any]:
    """Return what an object refers to."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or ())
    elif isinstance(thing, MethodType):
        yield thing.__self__
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif not isinstance(thing, type):
        yield from getattr(thing, "__dict__", {}).values()


def held_bytes(thing: Any) -> int:
    """Return the bytes of all tensors that an object refers to, each memory once."""
    found: dict[int, int] = {}
    seen, left = dict[int, Any](), [thing]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            left.extend(_below(one))
    return sum(found.values())


def _plan(path: Path, count: int, num_stages: int, **settings: Any) -> EnginePlan:
    fixed = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 40, "max_num_seqs": 4}
    given = {"tensor_parallel_size": count, "num_stages": num_stages, "max_model_len": 256, "stage_num_threads": 1}
    return plan_engine(EngineConfig.from_flat(str(path), **fixed, **given, **settings), Hardware(1))


def _check(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what each member holds with the plan."""
    monkeypatch.setattr(
        build_stage, "choose_kernels", lambda _, dtype, **others: KeepingKernels(dtype, packs_weights=False)
    )
    planned = [stage.weight_bytes for stage in plan.stages]
    if plan.model.quantization is not None:  # the plan's are of a CPU, which holds plain weights
        planned = stage_weight_bytes(plan.model, plan.layers, plan.dtype_bytes)
    for index, stage in enumerate(plan.stages):
        for rank in range(plan.num_members):
            spec = plan.stage_spec(index, rank)
            members: Any = OneOfMembers(rank, plan.num_members) if plan.num_members > 1 else None
            model: Any = build_stage.build_stage_model(spec, plan.model, None, members)
            held = held_bytes(model) - held_bytes(model.taps)  # the plan counts them apart
            assert held == pytest.approx(planned[index], rel=MOST), (index, rank)
            kept = [build_stage.allocate_kv_caches(spec, plan.model), _of_head(spec, model)]
            assert held_bytes(kept) == pytest.approx(stage.kv_cache_bytes + stage.state_bytes, rel=MOST), (index, rank)


def _of_head(spec: StageSpec, model: Any) -> Any:
    """Return the KV cache of the draft head, if there is one."""
    if model.draft_head is None:
        return None
    tables: Any = torch.zeros(1, spec.max_num_seqs, spec.blocks_per_row, dtype=torch.int32)
    tokens: Any = type("Tokens", (), {"table": torch.zeros(spec.max_num_seqs, 8, dtype=torch.int32)})
    return Speculation(spec, torch.device("cpu"), tokens, model.draft_head, tables).head_kv_caches


def _full(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.full)


def _cells(in_ci: set[tuple[Any, ...]], *values: Any) -> list[Any]:
    """Return all combinations, of which CI runs some."""
    return [pytest.param(*each, marks=() if each in in_ci else pytest.mark.full) for each in product(*values)]


@pytest.mark.parametrize(
    ("case", "num_stages"), _cells({("dense", 2), ("tied", 1), ("states and experts", 2)}, CASES, (1, 2))
)
def test_a_member_holds_what_the_plan_says(tmp_path, monkeypatch, case, num_stages):
    family, seed, changes = CASES[case]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    for count in (1, 2, 8):  # of KV heads there are 4
        _check(_plan(path, count, num_stages), monkeypatch)


@pytest.mark.parametrize(
    ("case", "form"), _cells({("dense", "gptq order"), ("experts", "fp8 blocks")}, ("dense", "experts"), FORMS)
)
def test_a_member_holds_what_the_plan_says_of_few_bits(tmp_path, monkeypatch, case, form):
    family, seed, changes = CASES[case]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    values = json.loads((path / "config.json").read_text()) | {"quantization_config": FORMS[form]}
    (path / "config.json").write_text(json.dumps(values))
    for count in (1, 2, 4):
        _check(_plan(path, count, 2), monkeypatch)


WHOLE = [case for case in CASES if "experts" in case or case in ("sinks and pairs", "a norm of all heads")]


@pytest.mark.parametrize(("case", "num_stages"), _cells({("sinks and pairs", 2), ("shared experts", 1)}, WHOLE, (1, 2)))
def test_a_member_holds_what_the_plan_says_of_whole_experts(tmp_path, monkeypatch, case, num_stages):
    family, seed, changes = CASES[case]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    for count in (2, 8):
        _check(_plan(path, count, num_stages, enable_expert_parallel=True), monkeypatch)


@pytest.mark.parametrize("form", [_full(each) if each != "fp8 blocks" else each for each in FORMS])
def test_a_member_holds_what_the_plan_says_of_whole_experts_of_few_bits(tmp_path, monkeypatch, form):
    family, seed, changes = CASES["experts"]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    values = json.loads((path / "config.json").read_text()) | {"quantization_config": FORMS[form]}
    (path / "config.json").write_text(json.dumps(values))
    for count in (2, 8):
        _check(_plan(path, count, 2, enable_expert_parallel=True), monkeypatch)


class _ReadTensors(CheckpointWeights):
    """Notes how many elements are read of experts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_read = 0

    def get(self, name: str, *given: Any, **more: Any) -> torch.Tensor:
        tensor = super().get(name, *given, **more)
        self.num_read += tensor.numel() if ".experts." in name else 0
        return tensor


@pytest.mark.parametrize("case", ["experts", "sinks and pairs"])
def test_a_member_reads_its_own_experts_alone(tmp_path, monkeypatch, caplog, case):
    """And none of the others' is said to be left over; those of all together are all that there are."""
    family, seed, changes = CASES[case]
    path = make_checkpoint(family, seed, tmp_path, **{**SIZES, **changes})
    sources = list[_ReadTensors]()

    def opened(*_: Any) -> _ReadTensors:
        sources.append(_ReadTensors(path))
        return sources[-1]

    monkeypatch.setattr(build_stage, "open_weights", opened)
    plans = [_plan(path, count, 1, enable_expert_parallel=True) for count in (1, 4)]
    for plan, rank in [(plans[0], 0), *((plans[1], rank) for rank in range(4))]:
        members: Any = OneOfMembers(rank, plan.num_members) if plan.num_members > 1 else None
        build_stage.build_stage_model(plan.stage_spec(0, rank), plan.model, None, members)
    whole, *parts = (source.num_read for source in sources)
    assert parts == [whole // 4] * 4
    assert "not used" not in caplog.text


@pytest.mark.parametrize(("kind", "num_stages"), _cells({("eagle3", 2), ("mtp", 1)}, (*HEADS, "mtp"), (1, 2)))
def test_a_member_holds_what_the_plan_says_of_a_draft_head(tmp_path, monkeypatch, kind, num_stages):
    family, seed, changes = CASES["states" if kind == "mtp" else "dense"]
    path = make_checkpoint(family, seed, tmp_path / "model", **{**SIZES, **changes})
    speculative: dict[str, Any] = {"method": kind.partition("_")[0]}
    if kind != "mtp":
        speculative["model"] = str(make_head(kind, path, tmp_path / "head", head_multiple=4))
    for count in (1, 2, 4):
        _check(_plan(path, count, num_stages, speculative=speculative), monkeypatch)


def test_experts_that_cannot_be_cut_are_named(tmp_path):
    path = make_checkpoint("qwen3_moe", 0, tmp_path, **{**SIZES, **EXPERTS, "num_experts": 6})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4, 6 experts; expected: one of 1, 2 for"):
        _plan(path, 4, 1, enable_expert_parallel=True)
    values = json.loads((path / "config.json").read_text()) | {"moe_intermediate_size": 258}
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"258 dimensions of an expert, and 6 experts; expected: one of 1, 2 for"):
        _plan(path, 4, 1)
    dense = make_checkpoint("qwen3", 0, tmp_path / "dense", **SIZES)
    with pytest.raises(ConfigError, match=r"enable_expert_parallel=true, Qwen3ForCausalLM of layers without experts"):
        _plan(dense, 2, 1, enable_expert_parallel=True)


def test_a_head_that_cannot_be_cut_is_named(tmp_path):
    path = make_checkpoint("qwen3", 0, tmp_path / "model", **SIZES)
    head = make_head("eagle3", path, tmp_path / "head", head_multiple=3)
    with pytest.raises(
        ConfigError, match=r"the draft head cannot be cut .*tensor_parallel_size=8, .*; expected: one of"
    ):
        _plan(path, 8, 1, speculative={"method": "eagle3", "model": str(head)})
