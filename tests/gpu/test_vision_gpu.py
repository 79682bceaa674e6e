"""Pictures on a GPU: the tower against its float32 self, its attention inside a graph, and positions along axes."""

from __future__ import annotations

import kernel_checks as checks
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from raypp.models.layer import axis_frequencies, inverse_frequencies
from raypp.models.qwen3_vl import Qwen3VLVisionTower
from raypp.models.rope_config import RopeConfig
from raypp.models.vision_config import PixelBounds, VisionConfig
from raypp.models.weights import DummyWeights
from raypp.ops.cuda.heads import rotation_table
from raypp.ops.cuda.kernel_launch import Device
from raypp.ops.host_to_device import concatenated
from raypp.ops.vision import linear_gelu_tanh, segment_attention
from raypp.prompt_items import EncoderItem

CUDA = torch.device("cuda")
# The heads of Qwen3-VL-8B's tower, fewer of them and fewer blocks.
CONFIG = VisionConfig(
    depth=4,
    hidden_size=4 * 72,
    intermediate_size=560,
    num_heads=4,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=256,
    grid_side=48,
    deepstack_layers=(1, 2),
    rope_theta=10000.0,
    image_token_id=0,
    video_token_id=1,
    vision_start_token_id=2,
    vision_end_token_id=3,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    image_pixels=PixelBounds(min_pixels=65536, max_pixels=1 << 24),
    video_pixels=PixelBounds(min_pixels=4096, max_pixels=1 << 24),
)


def _item(seed: int, rows: int, columns: int) -> EncoderItem:
    patches = np.random.default_rng(seed).integers(0, 256, (rows * columns, CONFIG.patch_dim), np.uint8)
    return EncoderItem.of(patches, (1, rows, columns), rows * columns // 4)


def test_the_tower_computes_in_bf16_what_it_does_in_float32():
    items = [_item(0, 14, 14), _item(1, 28, 20), _item(2, 4, 50)]
    rows = {}
    for device, dtype in ((torch.device("cpu"), torch.float32), (CUDA, torch.bfloat16), (CUDA, torch.float32)):
        tower = Qwen3VLVisionTower(CONFIG, dtype, device, DummyWeights(0, device))
        batch = tower.select_items(items, [0, 1, 2])
        with torch.inference_mode():
            encoded = tower.split_output(tower.eager_forward(batch), batch)
        assert [e.rows.shape for e in encoded] == [(3, item.num_tokens, 256) for item in items]
        rows[device.type, dtype] = torch.cat([e.rows.float().cpu() for e in encoded], dim=1)
    exact = rows["cpu", torch.float32]
    for (device, dtype), found in rows.items():
        error = ((found - exact).norm() / exact.norm()).item()
        print(f"\n{device} {dtype}: relative error {error:.2e}")
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_pictures_go_to_the_device_without_a_wait():
    tower = Qwen3VLVisionTower(CONFIG, torch.bfloat16, CUDA, DummyWeights(0, CUDA))
    items = [_item(0, 14, 14), _item(1, 28, 20)]
    with torch.inference_mode():
        for mode in ("default", "error"):  # first without: kernels are compiled
            torch.cuda.set_sync_debug_mode(mode)
            try:
                batch = tower.select_items(items, [1, 0])
                tower.split_output(tower.eager_forward(batch), batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_what_is_queued_may_be_dropped_at_once():
    rows = [np.full((50_000, 16), value, np.uint8) for value in range(8)]
    torch.cuda._sleep(200_000_000)  # all copies below wait behind it
    copies = [concatenated([row], CUDA).to(CUDA, non_blocking=True) for row in rows]
    assert [copy.unique().tolist() for copy in copies] == [[value] for value in range(8)]


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(2048, 288, 1120), (1, 288, 560), (33, 72, 8)])
def test_gelu_is_the_tanh_approximation(dtype, num_rows, num_inputs, num_outputs):
    generator = torch.Generator(device=CUDA).manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=generator, device=CUDA, dtype=dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator, device=CUDA, dtype=dtype) * num_inputs**-0.5
    bias = torch.randn(num_outputs, generator=generator, device=CUDA, dtype=dtype)
    product = F.linear(x.double(), weight.double(), bias.double())
    expected, exact = F.gelu(product, approximate="tanh"), F.gelu(product)
    found = linear_gelu_tanh(x, weight, bias).double()
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    if found.numel() > 1_000_000:  # enough for rounding to average out of the difference between the two
        apart = exact - expected
        towards_exact = ((found - expected) * apart).mean() / apart.square().mean()
        assert abs(towards_exact.item()) < 0.5


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize(("num_patches", "num_heads", "head_dim"), [(784, 16, 72), (1, 16, 64), (33, 3, 80)])
def test_heads_of_a_vision_tower(dtype, num_patches, num_heads, head_dim):
    checks.check_vision_heads(dtype, num_patches, num_heads, head_dim)


@pytest.mark.parametrize("head_dim", [32, 64, 72, 80])
def test_segments_attend_to_themselves_inside_of_a_graph(head_dim):
    num_patches, heads = 640, 4
    generator = torch.Generator(device=CUDA).manual_seed(head_dim)
    q, k, v = torch.randn(3, num_patches, heads, head_dim, generator=generator, device=CUDA, dtype=torch.bfloat16)
    starts = torch.tensor([0, num_patches, num_patches, num_patches], dtype=torch.int32, device=CUDA)
    segment_attention(q, k, v, starts, num_patches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = segment_attention(q, k, v, starts, num_patches)
    for ends in ([640, 640, 640], [196, 452, 640], [1, 1, 640], [0, 639, 640]):
        starts.copy_(torch.tensor([0, *ends], dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, segment_attention(q, k, v, starts, num_patches))
        for start, end in zip([0, *ends], ends, strict=False):
            parts = (x[start:end].transpose(0, 1).unsqueeze(0).float() for x in (q, k, v))
            expected = F.scaled_dot_product_attention(*parts).squeeze(0).transpose(0, 1)
            torch.testing.assert_close(out[start:end].float(), expected, atol=2e-2, rtol=2e-2)


def test_equal_positions_on_all_axes_turn_as_one():
    rope, head_dim = RopeConfig(theta=5e6, mrope_section=(24, 20, 20)), 128
    positions = torch.tensor([0, 1, 7, 4095, 200_000], device=CUDA)
    plain = rotation_table(positions, inverse_frequencies(head_dim, rope).to(CUDA), Device.of(CUDA))
    axes = axis_frequencies(head_dim, rope)
    assert axes is not None
    along = rotation_table(positions.unsqueeze(1).repeat(1, 3), axes.to(CUDA), Device.of(CUDA))
    torch.testing.assert_close(along.cos, plain.cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(along.sin, plain.sin, atol=1e-5, rtol=0)
