"""Parts of transformers' modules for members of a stage: what each holds, against the plan and the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shrunken_models import make_shrunken

from raypp.config.engine_config import EngineConfig
from raypp.models import config as config_module
from raypp.models.member_sizes import Member, span_of
from raypp.models.registry import build_model
from raypp.models.transformers_members import Cut, Piece
from raypp.models.transformers_probe import answer
from raypp.models.weights import CheckpointWeights
from raypp.ops.members import LoneMember
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware


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


@pytest.mark.parametrize(("model_type", "count"), [("mistral", 4), ("qwen3_moe", 2), ("deepseek_v3", 2)])
def test_a_member_holds_what_is_planned(model_type: str, count: int, tmp_path: Path) -> None:
    path = make_shrunken(model_type, tmp_path)
    given = {"model_impl": "transformers", "tensor_parallel_size": count, "skip_tokenizer_init": True}
    plan = plan_engine(EngineConfig.from_flat(str(path), max_model_len=64, stage_num_threads=1, **given), Hardware(1))
    held, num_read = set(), 0

    class Noted(CheckpointWeights):
        def slices(self) -> dict[str, Any]:
            return {name: _Noted(each) for name, each in super().slices().items()}

    class _Noted:
        def __init__(self, of_file: Any) -> None:
            self._of_file = of_file

        def __getitem__(self, index: object) -> torch.Tensor:
            nonlocal num_read
            found: torch.Tensor = self._of_file[index]
            num_read += found.nbytes
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._of_file, name)

    for rank in range(count):
        members: Any = LoneMember(count)
        members.rank = rank
        where = {"dtype": torch.float32, "device": torch.device("cpu"), "path": path, "members": members}
        model = build_model(plan.model, start_layer=0, end_layer=4, **where)
        model.load_weights(Noted(path))
        held.add(model.weight_bytes)
    assert len(held) == 1
    assert held.pop() == pytest.approx(plan.memory[0].weight_bytes, rel=0.03)
    assert num_read / count == pytest.approx(plan.memory[0].weight_bytes, rel=0.03)
