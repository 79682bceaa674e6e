"""How many experts of a layer a step reads: by the router, and by even routing, for several numbers of rows.

Layers are built in this process with the model's weights, or random ones, and compute steps of random tokens without a
past. What an even choice would give by chance stands beside: E * (1 - (1 - k / E)^rows).

python benchmarks/micro/expert_choices.py --model benchmarks/models/qwen3-30b-a3b --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raypp.models.config import ModelConfig, load_model_config
from raypp.models.registry import build_model
from raypp.models.weights import open_weights
from raypp.ops.attention import AttentionBatch
from raypp.ops.backend import Experts, KernelSet, Routing, choose_experts
from raypp.ops.device_kernels import choose_kernels
from raypp.ops.kv_cache import allocate_layer_cache
from raypp.ops.weight import Weight

BLOCK_SIZE = 16


class CountingKernels:
    """A kernel set whose experts count, before they compute, how many of them the tokens choose."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self.counts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def experts(
        self,
        norm_weight: torch.Tensor,
        eps: float,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        routing: Routing,
    ) -> Experts:
        """Return the experts of the kernel set, counted."""
        norm, router = norm_weight.float(), router.float()
        experts = self._kernels.experts(norm_weight, eps, router.to(norm_weight.dtype), gate_up, down, routing)

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            x = hidden.float()
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
            chosen, _ = choose_experts((normed @ router.T).to(hidden.dtype), routing)
            self.counts.append(len(chosen.unique()))
            return experts(hidden)

        return counted


def distinct_experts(
    config: ModelConfig,
    rows: list[int],
    *,
    num_layers: int,
    num_steps: int,
    model_path: str,
    load_format: str = "dummy",
    dtype: torch.dtype = torch.float32,
    device: torch.device,
) -> dict[int, list[float]]:
    """Return, by number of rows, the distinct experts of each sparse layer, the mean over steps."""
    kernels = CountingKernels(choose_kernels(device, dtype))
    end = min(num_layers, config.num_layers)
    model = build_model(config, start_layer=0, end_layer=end, dtype=dtype, device=device, kernels=kernels)
    model.load_weights(open_weights(load_format, model_path, 0, device))  # type: ignore[arg-type]
    cache_sizes = (max(rows) + 1, BLOCK_SIZE, config.num_kv_heads, config.head_dim, config.head_dim, dtype, device)
    caches = [allocate_layer_cache(*cache_sizes) for _ in range(end)]
    found = {}
    for count in rows:
        sums: dict[int, float] = defaultdict(float)
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(step)
            input_ids = torch.randint(config.vocab_size, (count,), generator=generator).to(device)
            attention = AttentionBatch(
                num_decode_rows=count,
                decode_query_len=1,
                seq_lens=torch.ones(count, dtype=torch.int32, device=device),
                block_tables=[torch.arange(1, count + 1, dtype=torch.int32, device=device).unsqueeze(1)],
                slot_mappings=[torch.arange(1, count + 1, device=device) * BLOCK_SIZE],
                prefill_query_lens=[],
                prefill_seq_lens=[],
            )
            kernels.counts.clear()
            model.plan_attention(attention, 0)
            model.forward(
                model.embed(input_ids), torch.zeros(count, dtype=torch.int64, device=device), attention, caches
            )
            for place, distinct in enumerate(kernels.counts):
                sums[place] += distinct
        found[count] = [total / num_steps for total in sums.values()]
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with config.json, and weights if any")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="dummy")
    parser.add_argument("--layers", type=int, default=4, help="how many, from the first on")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = load_model_config(Path(arguments.model))
    if config.experts is None:
        parser.error(f"{config.architecture} has no experts")
    num_experts, share = config.experts.num_experts, config.experts.num_chosen / config.experts.num_experts
    print(f"{config.architecture}: {config.experts.num_chosen} of {num_experts} experts; {arguments.steps} steps")
    for is_even in (False, True):
        routed = replace(config, experts=replace(config.experts, are_chosen_evenly=is_even))
        with torch.inference_mode():
            found = distinct_experts(
                routed,
                arguments.rows,
                num_layers=arguments.layers,
                num_steps=arguments.steps,
                model_path=arguments.model,
                load_format=arguments.load_format,
                dtype=getattr(torch, arguments.dtype),
                device=torch.device(arguments.device),
            )
        for rows, by_layer in found.items():
            expected = num_experts * (1 - (1 - share) ** rows)
            layers = " ".join(f"{mean:.1f}" for mean in by_layer)
            way = "even" if is_even else "router"
            print(f"{way:6} {rows:4} rows: distinct experts by layer {layers}; by chance {expected:.1f}")


if __name__ == "__main__":
    main()
