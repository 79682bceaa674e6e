"""How the products of experts are cut: by the table, which GPUs share, else by what is good in general."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from raypp.ops.cuda import experts
from raypp.ops.cuda.experts import TABLE, ExpertShape, choose_cut, cut_entry, default_cut, shape_entry
from raypp.ops.cuda.kernel_launch import Device

SHAPE = ExpertShape(2048, 768, 128, 8)
H200 = Device(torch.device("cpu"), 132, has_dependent_launch=True, name="NVIDIA H200")


@pytest.fixture
def table(tmp_path, monkeypatch):
    cuts = {"8": [16, [64, 64, 1, 4, 3], [64, 128, 2, 4, 2]], "64": [32, [64, 64, 1, 4, 4], [128, 64, 1, 8, 4]]}
    path = tmp_path / "cuts.json"
    path.write_text(json.dumps({"NVIDIA H200": {shape_entry(SHAPE): cuts}}))
    monkeypatch.setattr(experts, "TABLE", path)
    experts._table.cache_clear()
    yield cuts
    experts._table.cache_clear()


def test_the_nearest_number_of_tokens_is_looked_up(table):
    found = [cut_entry(choose_cut(num_tokens, SHAPE, H200)) for num_tokens in (1, 8, 22, 23, 64, 5000)]
    assert found == [*[table["8"]] * 3, *[table["64"]] * 3]


def test_a_gpu_that_nobody_measured_takes_those_of_another_if_they_fit(table):
    other = replace(H200, name="NVIDIA H100")
    assert cut_entry(choose_cut(8, SHAPE, other)) == table["8"]
    small = replace(other, shared_bytes=99 << 10)
    assert choose_cut(8, SHAPE, small) == default_cut(8, SHAPE, small)


def test_other_shapes_are_not_in_the_table(table):
    for shape in (replace(SHAPE, hidden=1024), replace(SHAPE, kinds=("fp8", "fp8"))):
        for num_tokens in (1, 40, 5000):
            assert choose_cut(num_tokens, shape, H200) == default_cut(num_tokens, shape, H200)


def test_products_of_four_bits_are_split_where_there_are_few_programs():
    """gpt-oss-20b's: one token, two, and more that give each processor enough."""
    shape = ExpertShape(2880, 2880, 32, 4, ("fp4", "fp4"))
    splits = [default_cut(num_tokens, shape, H200).gate_up.num_splits for num_tokens in (1, 2, 4, 64)]
    assert splits == [5, 4, 2, 1]
    assert default_cut(1, replace(shape, hidden=512), H200).gate_up.num_splits == 1  # too few inputs


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_every_cut_fits_the_shared_memory(shared_kib):
    """Of compute capability 8.6, 8.0 and 9.0; where there is enough, nothing is cut."""
    device, roomy = replace(H200, shared_bytes=shared_kib << 10), replace(H200, shared_bytes=1 << 30)
    for kind in ("plain", "fp8", "int4", "fp4"):
        shape = replace(SHAPE, kinds=(kind, kind))
        for num_tokens in (8, 64, 256, 512, 1024, 4096):
            cut, whole = (default_cut(num_tokens, shape, each) for each in (device, roomy))
            for is_gated, tuning in ((True, cut.gate_up), (False, cut.down)):
                needed = experts._stage_bytes(cut.tile_rows, kind, tuning, is_gated) * (tuning.num_stages - 1)
                assert needed <= device.shared_bytes
            assert shared_kib == 99 or cut == whole or (kind == "fp4" and shared_kib < 227)  # of registers
    assert default_cut(4096, SHAPE, device).gate_up.outputs == (64 if shared_kib == 99 else 128)


def test_the_table_that_ships_can_be_read():
    for shapes in json.loads(TABLE.read_text()).values():
        for cuts in shapes.values():
            for tokens, (tile_rows, *products) in cuts.items():
                assert int(tokens) > 0
                assert tile_rows in (0, 8, 16, 32, 64, 128)
                assert [len(product) for product in products] == [5, 5]
