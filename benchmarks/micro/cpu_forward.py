"""How long a model's forward takes on one CPU thread, against transformers'; and its linear layers, against `F.linear`.

    python benchmarks/micro/cpu_forward.py [--model tiny] [--repeats 60]

Times are the thread's own CPU time, the median, so that a busy machine disturbs them little. Linear layers go through
more weights than caches hold, as a forward does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import print_report

from raypp.models.config import load_model_config
from raypp.models.decoder import DecoderModel
from raypp.models.registry import build_model, resolve_model_path
from raypp.models.weights import CheckpointWeights
from raypp.ops.attention import AttentionBatch
from raypp.ops.cpu.torch_kernels import Linear
from raypp.ops.kv_cache import allocate_layer_cache, sides

BLOCK_SIZE = 16
CPU = torch.device("cpu")
DECODE_ROWS = (1, 8, 32, 64)
CONTEXT = 100
PREFILL_TOKENS = (64, 512)
LINEAR_SHAPES = ((256, 512), (256, 1536), (768, 256), (256, 4096), (1024, 4096))  # input, output
LINEAR_ROWS = (1, 2, 4, 8, 64)
COLD_BYTES = 48 << 20


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of a call, in milliseconds."""
    times = []
    for _ in range(repeats + 3):
        started = time.thread_time()
        call()
        times.append((time.thread_time() - started) * 1e3)
    return statistics.median(times[3:])


def forward_call(model: DecoderModel, config: Any, decode_lens: Sequence[int], prefill: int) -> Callable[[], object]:
    """Return a whole forward of decode rows of these lengths, or of one prompt of `prefill` tokens."""
    lens = list(decode_lens) or [prefill]
    query_lens = [1] * len(decode_lens) or [prefill]
    width = -(-max(lens) // BLOCK_SIZE)
    tables = (torch.randperm(len(lens) * width) + 1).view(len(lens), width).to(torch.int32)
    sizes = (1 + tables.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim, config.head_dim)
    caches = [allocate_layer_cache(*sizes, torch.float32, CPU) for _ in range(config.num_layers)]
    for side in sides(caches):
        side.normal_()
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(query_lens))
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lens, query_lens, strict=True)])
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    input_ids = torch.randint(config.vocab_size, positions.shape, dtype=torch.int32)

    def call() -> object:
        batch = AttentionBatch(
            num_decode_rows=len(decode_lens),
            decode_query_len=1,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=[tables],
            slot_mappings=[slots],
            prefill_query_lens=[] if decode_lens else query_lens,
            prefill_seq_lens=[] if decode_lens else lens,
        )
        hidden = model.forward(model.embed(input_ids), positions, batch, caches)
        return model.compute_logits(hidden[-len(lens) :])

    return call


def measure_forwards(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of raypp's and transformers' forward, by shape."""
    config = load_model_config(path)
    model = build_model(config, start_layer=0, end_layer=config.num_layers, dtype=torch.float32, device=CPU)
    model.load_weights(CheckpointWeights(path))
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    figures = {}
    for rows in DECODE_ROWS:
        cache = transformers.DynamicCache()
        reference(input_ids=torch.zeros(rows, CONTEXT, dtype=torch.int64), past_key_values=cache, logits_to_keep=1)
        inputs = torch.zeros(rows, 1, dtype=torch.int64)

        def other(cache: Any = cache, inputs: torch.Tensor = inputs) -> object:
            cache.crop(-1)
            return reference(input_ids=inputs, past_key_values=cache)

        figures[f"decode {rows} rows of {CONTEXT}"] = {
            "raypp_ms": median_ms(forward_call(model, config, [CONTEXT] * rows, 0), repeats),
            "transformers_ms": median_ms(other, repeats),
        }
    for tokens in PREFILL_TOKENS:
        prompt = torch.zeros(1, tokens, dtype=torch.int64)
        figures[f"prefill {tokens} tokens"] = {
            "raypp_ms": median_ms(forward_call(model, config, [], tokens), repeats // 4),
            "transformers_ms": median_ms(lambda p=prompt: reference(input_ids=p, logits_to_keep=1), repeats // 4),
        }
    return figures


def measure_linears(repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of one product, by shape and rows."""
    figures = {}
    for inputs, outputs in LINEAR_SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(max(2, COLD_BYTES // (4 * inputs * outputs)))]
        packed = [Linear(weight) for weight in weights]
        for rows in LINEAR_ROWS:
            x = torch.randn(rows, inputs)
            calls = max(2, repeats // len(weights))
            figures[f"linear {inputs} -> {outputs}, {rows} rows"] = {
                "raypp_ms": median_ms(lambda x=x, p=packed: [layer(x) for layer in p], calls) / len(weights),
                "torch_ms": median_ms(lambda x=x, w=weights: [F.linear(x, weight) for weight in w], calls)
                / len(weights),
            }
    return figures


@torch.inference_mode()
def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    forwards = measure_forwards(resolve_model_path(arguments.model), arguments.repeats)
    figures = forwards | measure_linears(arguments.repeats)
    for name, times in figures.items():
        ours, theirs = times.values()
        print(f"{name:<32}{ours:9.3f} ms{theirs:9.3f} ms {list(times)[1].removesuffix('_ms')}{theirs / ours:7.2f}x")
    rounded = {name: {side: round(value, 4) for side, value in times.items()} for name, times in figures.items()}
    print_report("cpu_forward", vars(arguments), rounded)


if __name__ == "__main__":
    main()
