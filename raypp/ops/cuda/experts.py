"""The sparse MLP of a layer on an NVIDIA GPU, in three launches for few tokens and five for more.

    few     route, gate_up_few, down_few; not where a weight has 4 bits
    more    route, arrange, gate_up_tiles, down_tiles, sum_of_experts

The launches depend on the number of tokens alone, so a CUDA graph can hold them. `raypp/assets/expert_cuts.json` has
the cuts that benchmarks/micro/tune_experts.py found for some models; other shapes get cuts that are good for those.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from raypp.ops.backend import ExpertWeights, Gate, Router
from raypp.ops.cuda.expert_products import (
    down_few,
    down_tiles,
    gate_up_few,
    gate_up_tiles,
    has_kernel,
    sum_of_experts,
)
from raypp.ops.cuda.int4_products import Int4Product
from raypp.ops.cuda.kernel_launch import Device, Workspace
from raypp.ops.cuda.packed_int4 import TILE, pack
from raypp.ops.cuda.projection import Tuning
from raypp.ops.cuda.router_kernels import Routed, arrange, most_tiles, route
from raypp.ops.weight import Weight, WeightKind

FOUR_BITS = ("int4", "fp4")
TABLE = Path(__file__).parents[2] / "assets" / "expert_cuts.json"

_LEAST_TILE_ROWS = 16
_SPLIT_PROGRAMS, _LEAST_SPLIT_INPUTS, _MAX_SPLITS = 12, 512, 8
"""Of each processor, of each split, and of a product."""
MOST_FEW_PAIRS = 16
"""Up to so many pairs of a token and an expert are multiplied element by element."""


@dataclass(frozen=True)
class ExpertShape:
    """What the cuts depend on, besides the tokens."""

    hidden: int  # H
    intermediate: int  # I
    num_experts: int  # E, of all members
    num_chosen: int  # k
    kinds: tuple[WeightKind, WeightKind] = ("plain", "plain")  # of gate_up and of down


@dataclass(frozen=True)
class ExpertCut:
    """How the work is cut.

    Args:
        tile_rows: The most pairs of a tile; 0: a program has one pair or token, and multiplies element by element.
        gate_up: Of the first product: pairs of a gate and an up.
        down: Of the second.
    """

    tile_rows: int
    gate_up: Tuning
    down: Tuning


def choose_cut(num_tokens: int, shape: ExpertShape, device: Device) -> ExpertCut:
    """Return how the experts of so many tokens are computed: by the table if it has the shape.

    Where a token's bits must not depend on others, always by tensor cores, and along the inputs in one order.
    """
    if device.is_invariant:
        cut = default_cut(max(num_tokens, 1 + MOST_FEW_PAIRS), shape, device)
        return replace(cut, gate_up=_unsplit(cut.gate_up), down=_unsplit(cut.down))
    return _tabulated(num_tokens, shape, device) or default_cut(num_tokens, shape, device)


def _unsplit(tuning: Tuning) -> Tuning:
    return replace(tuning, num_splits=1)


def default_cut(num_tokens: int, shape: ExpertShape, device: Device, tile_rows: int | None = None) -> ExpertCut:
    """Return a cut for shapes that are not in the table, with tiles of `tile_rows` if that is given."""
    num_pairs = num_tokens * shape.num_chosen
    gate_up, down = shape.kinds
    if tile_rows is None:
        rows = triton.next_power_of_2(triton.cdiv(num_pairs, shape.num_experts))
        most = 128 if shape.kinds in (("plain", "plain"), ("fp4", "fp4")) else 64
        is_few = num_pairs <= MOST_FEW_PAIRS and not set(FOUR_BITS) & set(shape.kinds)
        tile_rows = 0 if is_few else min(max(16, 2 * rows), most)
    if not tile_rows:
        return ExpertCut(0, _few_gate_up(gate_up), _few_down(shape))
    cuts = _tiles(tile_rows, gate_up, device, True), _tiles(tile_rows, down, device, False)
    sizes = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    num_tiles = most_tiles(num_pairs, shape.num_experts, tile_rows)
    return ExpertCut(
        tile_rows,
        *(
            _split(cut, num_tiles, *size, device) if kind == "fp4" else cut
            for kind, cut, size in zip(shape.kinds, cuts, sizes, strict=True)
        ),
    )


def _split(cut: Tuning, num_tiles: int, num_outputs: int, num_inputs: int, device: Device) -> Tuning:
    """Return the cut of a product of FP4, split along its inputs if processors have few programs."""
    num_programs = -(-num_outputs // TILE) * num_tiles
    most = min(_MAX_SPLITS, num_inputs // _LEAST_SPLIT_INPUTS)
    num_splits = min(_SPLIT_PROGRAMS * device.num_processors // num_programs, most)
    return Tuning(TILE, TILE, num_splits) if num_splits > 1 else cut


def shape_entry(shape: ExpertShape) -> str:
    """Return the table's name of a shape."""
    gate_up, down = shape.kinds
    sizes = f"hidden {shape.hidden}, intermediate {shape.intermediate}"
    return f"{sizes}, experts {shape.num_experts}, chosen {shape.num_chosen}, {gate_up} and {down}"


def cut_entry(cut: ExpertCut) -> list[Any]:
    """Return a cut as the table has it."""
    products = [
        [tuning.outputs, tuning.inputs, tuning.num_splits, tuning.num_warps, tuning.num_stages]
        for tuning in (cut.gate_up, cut.down)
    ]
    return [cut.tile_rows, *products]


def _tabulated(num_tokens: int, shape: ExpertShape, device: Device) -> ExpertCut | None:
    """Return the cut of the nearest number of tokens in the table. All GPUs of 227 KiB share what one has not."""
    tables = _table()
    if device.name not in tables and device.shared_bytes < Device.shared_bytes:
        return None
    for name in sorted(tables, key=lambda name: name != device.name):
        cuts = {int(tokens): entry for tokens, entry in tables[name].get(shape_entry(shape), {}).items()}
        if cuts:
            tile_rows, *products = cuts[min(cuts, key=lambda tokens: (abs(math.log2(tokens / num_tokens)), -tokens))]
            return ExpertCut(tile_rows, *(Tuning(*product) for product in products))
    return None


@cache
def _table() -> dict[str, Any]:
    """Return cuts by GPU, shape and number of tokens."""
    tables: dict[str, Any] = json.loads(TABLE.read_text())
    return tables


def _few_gate_up(kind: WeightKind) -> Tuning:
    """Return how the first product of few pairs is cut."""
    if kind == "plain":
        return Tuning(4, 1024, num_stages=2)
    return Tuning(16, 128, num_stages=4)


def _few_down(shape: ExpertShape) -> Tuning:
    """Return how the second product of few pairs is cut; a program has all of a token's experts."""
    rows = max(1, 32 // triton.next_power_of_2(shape.num_chosen))
    if shape.kinds[1] == "plain":
        return Tuning(min(8, rows), 256, num_stages=3)
    return Tuning(min(16, rows), 128, num_stages=4)


def _tiles(tile_rows: int, kind: WeightKind, device: Device, is_gated: bool) -> Tuning:
    """Return how a product of tiles is cut: into as many outputs as shared memory holds."""
    if kind == "fp8":
        tuning = Tuning(128, 128, num_warps=8 if tile_rows == 64 else 4, num_stages=3 if is_gated else 4)
    elif kind == "fp4":  # eight warps take up to four times as long
        is_narrow = is_gated or (tile_rows == 128 and device.shared_bytes < Device.shared_bytes)
        tuning = Tuning(64, 64) if is_narrow else Tuning(128, 64 if tile_rows == 64 else 128)
        tuning = replace(tuning, num_stages=3 if tile_rows >= 64 else 4)
    elif kind == "int4":
        tuning = Tuning(64, 128, num_warps=8 if tile_rows == 64 else 4, num_stages=4)
    elif tile_rows == 128:
        tuning = Tuning(128, 64, num_warps=8, num_stages=4)
    else:
        tuning = Tuning(64, 64 if is_gated or tile_rows > 16 else 128, num_stages=4)
    # The last stage is not kept. With fewer of them the largest tiles would spill registers (compute capability 12.0).
    while (tuning.num_stages - 1) * _stage_bytes(tile_rows, kind, tuning, is_gated) > device.shared_bytes:
        tuning = replace(tuning, outputs=tuning.outputs // 2)
    return tuning


def _stage_bytes(tile_rows: int, kind: WeightKind, tuning: Tuning, is_gated: bool) -> int:
    """Return the shared memory of the weights and tokens that a program multiplies at once."""
    of_weight, of_tokens = {"plain": (2, 2), "fp8": (1, 1), "int4": (0.5, 2), "fp4": (0.5, 2)}[kind]
    of_weight *= 2 if is_gated else 1
    return int(tuning.inputs * (tuning.outputs * of_weight + tile_rows * of_tokens))


_LOG = logging.getLogger(__name__)


class ExpertProducts:
    """The products of a layer's experts, and how they are cut.

    Args:
        weights: Theirs.
        dtype: Of the tokens.
        device: Where they run.
        workspace: For what several programs share.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype, device: Device, workspace: Workspace) -> None:
        gate_up, down = (_readable(weight, dtype, device) for weight in (weights.gate_up, weights.down))
        if gate_up.kind in FOUR_BITS and down.kind == "fp8":  # the first would have to round what the second reads
            gate_up = Weight(gate_up.dequantized(dtype))
        self._biases = tuple(
            None if bias is None else bias.contiguous() for bias in (weights.gate_up_bias, weights.down_bias)
        )
        self._gate = weights.gate
        self._kinds: tuple[WeightKind, WeightKind] = (_layout(gate_up.kind), _layout(down.kind))
        self._num_held = len(down.data)
        # A member's experts have as many tokens each as all of them: they are cut alike.
        num_experts, kinds = self._num_held + weights.num_others, (gate_up.kind, down.kind)
        self._shape = ExpertShape(down.num_outputs, down.num_inputs, num_experts, 1, kinds)
        self._gate_up = _product(gate_up, self._biases[0], weights.gate, is_gated=True)
        self._down = _product(down, self._biases[1], weights.gate, is_gated=False)
        self.num_bytes = gate_up.num_bytes + down.num_bytes  # biases aside
        self._device = device
        self._workspace = workspace
        self._cuts: dict[tuple[int, int], ExpertCut] = {}

    def cut(self, num_tokens: int, num_chosen: int) -> ExpertCut:
        """Return how so many tokens with so many experts each are cut."""
        cut = self._cuts.get((num_tokens, num_chosen))
        if cut is None:
            shape = replace(self._shape, num_chosen=num_chosen)
            cut = self._cuts[num_tokens, num_chosen] = choose_cut(num_tokens, shape, self._device)
        return cut

    def run(
        self,
        x: torch.Tensor,
        norm: tuple[torch.Tensor | None, float],
        routed: Routed,
        residual: torch.Tensor,
        cut: ExpertCut,
    ) -> torch.Tensor:
        """Return residual + each token's experts of norm(x). Shapes: x, residual [T, H]; the latter is overwritten."""
        device, num_chosen, (kind, next_kind) = self._device, routed.experts.shape[1], self._kinds
        gate_up, down, (bias, down_bias) = self._gate_up, self._down, self._biases
        if not cut.tile_rows and isinstance(gate_up, Weight) and isinstance(down, Weight):
            y = gate_up_few(x, *norm, gate_up, bias, self._gate, routed, cut.gate_up, device)
            return down_few(y, residual, down, down_bias, routed, cut.down, device)
        arranged = arrange(x, *norm, routed, self._num_held, cut.tile_rows or _LEAST_TILE_ROWS, kind, device)
        where = device, self._workspace
        between = gate_up_tiles(gate_up, bias, self._gate, arranged, num_chosen, next_kind, x, cut.gate_up, *where)
        y = down_tiles(between, down, down_bias, arranged, num_chosen, x, cut.down, *where)
        return sum_of_experts(y, routed, residual, device)


class CudaExperts:
    """See `raypp.ops.backend.Experts`.

    Args:
        norm_weight: [H].
        eps: Of the norm.
        router: Chooses them; its weight is of the tokens' type.
        weights: Theirs.
        device: Where it runs.
        workspace: For what several programs share.
    """

    def __init__(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: Router,
        weights: ExpertWeights,
        device: Device,
        workspace: Workspace,
    ) -> None:
        weight = router.weight
        self._norm = (norm_weight, eps)
        of_router = norm_weight if router.norm_weight is None else router.norm_weight
        self._router = replace(router, weight=(weight.float() * of_router.float()).to(weight.dtype))
        self.products = ExpertProducts(weights, weight.dtype, device, workspace)
        num_held = len(weight) - weights.num_others
        self._own = range(weights.first, weights.first + num_held) if weights.num_others else None
        self._device = device
        self._workspace = workspace

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream after the MLP, [T, H]; see `raypp.ops.backend.Experts`."""
        return self.run(hidden, self.cut(len(hidden)), residual)

    def cut(self, num_tokens: int) -> ExpertCut:
        """Return how so many tokens are cut."""
        return self.products.cut(num_tokens, self._router.routing.num_chosen)

    def run(self, hidden: torch.Tensor, cut: ExpertCut, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Do it with a cut of the caller's choice."""
        residual = hidden if residual is None else residual
        if not len(hidden):
            return residual
        routed = route(hidden, self._router, self._norm[1], self._device, self._workspace, self._own)
        return self.products.run(hidden, self._norm, routed, residual, cut)


class CudaChosenExperts:
    """See `raypp.ops.backend.ChosenExperts`; the arguments of `ExpertProducts`."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype, device: Device, workspace: Workspace) -> None:
        self._products = ExpertProducts(weights, dtype, device, workspace)
        self._first, self._num_held, self._has_others = weights.first, len(weights.down.data), weights.num_others > 0

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        if not len(x):
            return y
        experts, weights = experts.to(torch.int32).contiguous(), weights.float().contiguous()
        if self._has_others:
            own = experts - self._first
            is_own = (own >= 0) & (own < self._num_held)
            experts, weights = own.where(is_own, self._num_held), weights.where(is_own, 0.0)
        routed = Routed(experts, weights, self._has_others)
        return self._products.run(x.contiguous(), (None, 0.0), routed, y, self._products.cut(*experts.shape))


def _layout(kind: WeightKind) -> WeightKind:
    """Return the kind whose kernels multiply a kind."""
    return "int4" if kind == "fp4" else kind


def _product(weight: Weight, bias: torch.Tensor | None, gate: Gate, *, is_gated: bool) -> Weight | Int4Product:
    if weight.kind not in FOUR_BITS:
        return weight
    return Int4Product(pack(weight, 2 if is_gated else 1), bias, is_gated, gate)


def _readable(weight: Weight, dtype: torch.dtype, device: Device) -> Weight:
    """Return a weight of a form that the kernels read."""
    if not has_kernel(weight, dtype, device):
        if weight.kind != "plain":
            _log_widened(weight.kind, weight.block, weight.order is not None)
        weight = Weight(weight.dequantized(dtype))
    return weight.mapped(torch.Tensor.contiguous)


@functools.cache
def _log_widened(kind: str, block: tuple[int, int], has_order: bool) -> None:
    order = " in an order of their own" if has_order else ""
    _LOG.warning(
        "no kernel of this device multiplies experts in %s with a scale per %d x %d weights%s: they become 16 bits",
        kind,
        *block,
        order,
    )
