"""Parts of transformers' modules for members of a stage: what each holds, against the plan and the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_tensors import quantize_checkpoint
from shrunken_models import make_shrunken

from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.members import LoneMember
from raypp.models import config as config_module
from raypp.models.member_sizes import Member, span_of
from raypp.models.registry import build_model
from raypp.models.sizes import layer_sizes, share_of_member
from raypp.models.transformers_members import Cut, ModuleParts, Piece, parts_of
from raypp.models.transformers_model import empty_model, layers_of
from raypp.models.transformers_probe import answer
from raypp.models.weights import CheckpointWeights
from raypp.plan.engine_plan import EnginePlan, plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams


@pytest.fixture(autouse=True)
def _asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask transformers in this process: another one takes seconds to start."""
    monkeypatch.setattr(config_module, "asked", lambda _, path, *given, **options: answer(path, *given, **options))


@pytest.mark.parametrize(
    "cut",
    [
        Cut(-2, (Piece(16),)),
        Cut(-1, (Piece(24),), is_of_inputs=True),
        Cut(-1, (Piece(12), Piece(12))),
        Cut(-2, (Piece(16, 2),)),
        Cut(-2, (Piece(8), Piece(4, 2), Piece(4, 2))),
    ],
)
def test_parts_of_all_members_are_the_whole(cut: Cut) -> None:
    whole, count = torch.arange(16 * 24).view(16, 24), 4
    parts = [cut.of(whole, Member(rank, count)) for rank in range(count)]
    found, begin = [], 0
    for piece in cut.pieces:
        size, times = piece.part(Member(0, count)).size, count // piece.num_kv_heads if piece.num_kv_heads else 1
        of_piece = [part.narrow(cut.dim, begin, size) for part in parts]
        for first in range(0, count, times):
            assert all(torch.equal(of_piece[first], other) for other in of_piece[first : first + times])
        found += of_piece[::times]
        begin += size
    assert torch.equal(torch.cat(found, cut.dim), whole)
    if cut.is_of_inputs or cut.dim == -2:  # a product's weight: the same as blocks of outputs and inputs
        for rank, part in enumerate(parts):
            blocks = [map(span_of, each) for each in cut.blocks(16, 24, Member(rank, count))]
            assert torch.equal(torch.cat([whole[rows.slice, columns.slice] for rows, columns in blocks]), part)


class _Noted(CheckpointWeights):
    """Counts the bytes that are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_read = 0

    def get(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.noted(super().get(*args, **options))

    def slices(self) -> dict[str, Any]:
        return {name: _NotedSlice(each, self.noted) for name, each in super().slices().items()}

    def noted(self, read: torch.Tensor) -> torch.Tensor:
        self.num_read += read.nbytes
        return read


class _NotedSlice:
    def __init__(self, of_file: Any, noted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._of_file = of_file
        self._noted = noted

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._noted(self._of_file[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_file, name)


def _planned(path: Path, count: int, **settings: Any) -> EnginePlan:
    given = {"model_impl": "transformers", "tensor_parallel_size": count, "skip_tokenizer_init": True, **settings}
    return plan_engine(EngineConfig.from_flat(str(path), max_model_len=64, stage_num_threads=1, **given), Hardware(1))


def _held_and_read(path: Path, plan: EnginePlan) -> tuple[list[int], float]:
    """Return the bytes that each member holds, and those that one reads."""
    held, num_read, count = list[int](), 0, plan.num_members
    for rank in range(count):
        members: Any = LoneMember(count)
        members.rank = rank
        where = {"dtype": torch.float32, "device": torch.device("cpu"), "path": path, "members": members}
        model, source = build_model(plan.model, start_layer=0, end_layer=4, **where), _Noted(path)
        model.load_weights(source)
        held.append(model.weight_bytes)
        num_read += source.num_read
    return held, num_read / count


@pytest.mark.parametrize(
    ("model_type", "count", "share"),
    [
        ("granitemoe_swa", 2, 0.5),  # its plan cuts sinks
        ("mistral", 4, 0.25),
        ("qwen3_moe", 2, 0.5),
        ("deepseek_v3", 2, 0.55),
        ("phi3", 4, 0.25),
        ("gpt_oss", 2, 0.5),
        ("olmo2", 2, 0.75),  # its norms see all heads: the attention is whole
    ],
)
def test_a_member_holds_what_is_planned(model_type: str, count: int, share: float, tmp_path: Path) -> None:
    path = make_shrunken(model_type, tmp_path)
    plan = _planned(path, count)
    held, num_read = _held_and_read(path, plan)
    assert held == pytest.approx([plan.memory[0].weight_bytes] * count, rel=0.03)
    assert num_read == pytest.approx(plan.memory[0].weight_bytes, rel=0.03)
    assert share_of_member(plan.model) == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("model_type", ["mistral", "lfm2", "gpt_oss"])
def test_no_two_stages_hold_the_same(model_type: str, tmp_path: Path) -> None:
    """What runs behind the last layer is the last stage's, whatever the decoder calls it."""
    path = make_shrunken(model_type, tmp_path, tie_word_embeddings=False)
    where: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "path": path}
    config, found = _planned(path, 1).model, list[tuple[int, int]]()
    for start, end in ((0, 4), (0, 1), (1, 3), (3, 4)):
        model, source = build_model(config, start_layer=start, end_layer=end, **where), _Noted(path)
        model.load_weights(source)
        found.append((model.weight_bytes, source.num_read))
    whole, *parts = found
    assert tuple(map(sum, zip(*parts, strict=True))) == whole


@pytest.mark.parametrize(
    ("form", "count"), [("compressed int4 of 32", 2), ("awq", 4), ("compressed fp8 channel", 4), ("fp8 blocks", 2)]
)
def test_a_member_holds_its_part_of_a_form(form: str, count: int, tmp_path: Path) -> None:
    """Blocks of 12 x 20 are cut by parts: what is read is more then."""
    source = make_shrunken("llama", tmp_path / "source", head_dim=32, intermediate_size=128)
    quantize_checkpoint(form, source, tmp_path / "small", tmp_path / "plain")
    plan = _planned(tmp_path / "small", count)
    held, num_read = _held_and_read(tmp_path / "small", plan)
    model = plan.model
    vocabulary = (2 * model.vocab_rows + 1) * model.hidden_size * 4
    expected = vocabulary + sum(size.weight_bytes for size in layer_sizes(model, 4))
    assert held == pytest.approx([expected] * count, rel=0.03)
    assert num_read == pytest.approx(expected, rel=0.3 if form == "fp8 blocks" else 0.05)  # stored zeros have 4 bits


def test_random_weights_of_members_are_parts_of_one_model(tmp_path: Path) -> None:
    source = make_shrunken("llama", tmp_path / "source")
    quantize_checkpoint("awq", source, tmp_path / "small", tmp_path / "plain")
    for path in (source, tmp_path / "small"):
        texts = []
        for count in (1, 4):
            engine = LocalEngine(_planned(path, count, load_format="dummy"))
            texts.append(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model_type", "count", "message"),
    [
        ("mamba2", 2, r"no attention, MLP or experts .* got: tensor_parallel_size=2, .*num_stages=2"),
        ("mistral", 3, r"2 KV heads; expected: one of 1, 2, 4 for"),
        ("phi3", 8, r"4 heads; expected: one of 1, 2, 4 for"),
        ("olmo2", 5, r"96 dimensions of mlp.down_proj; expected: one of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 for"),
        ("gpt_oss", 3, r"2 KV heads; expected: one of 1, 2, 4 for"),
    ],
)
def test_what_cannot_be_cut_is_refused(model_type: str, count: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _planned(make_shrunken(model_type, tmp_path), count)


def test_a_norm_of_all_heads_leaves_an_attention_whole(tmp_path: Path) -> None:
    """Norms of each head with a weight of its own, of one module for all of them, would be those of other heads."""
    parts = {name: _parts(name, tmp_path, **values) for name, values in (("olmo2", {}), ("stablelm", {}))}
    assert parts["olmo2"].summed == {f"model.layers.{index}.mlp.down_proj" for index in range(4)}
    assert "model.layers.0.self_attn.o_proj" in parts["stablelm"].summed
    with_norms = _parts("stablelm", tmp_path, qk_layernorm=True)
    assert with_norms.summed == parts["olmo2"].summed


def _parts(model_type: str, tmp_path: Path, **values: Any) -> ModuleParts:
    path = make_shrunken(model_type, tmp_path / f"{model_type}{len(values)}", **values)
    model = empty_model(path, torch.float32)
    return parts_of(model, layers_of(model))
