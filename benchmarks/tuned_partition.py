"""Is the split that `raypp tune` finds as fast as the even one, or faster? Measured on engines, by turns.

python benchmarks/tuned_partition.py            tiny, and a model of the same kind with a large vocabulary
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from raypp import LLM, EngineConfig, SamplingParams
from raypp.actors.tune import tune_engine

LARGE_VOCABULARY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 65536,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT_LEN = 16


def main() -> None:
    """Tune and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE_VOCABULARY))
        for model, name in (("tiny", "tiny"), (folder, "vocabulary of 65,536")):
            compare(model, name, args)


def compare(model: str, name: str, args: argparse.Namespace) -> None:
    """Tune one model, run it with both splits by turns, print a table."""
    config = EngineConfig.from_flat(
        model,
        num_stages=args.num_stages,
        load_format="auto" if model == "tiny" else "dummy",
        skip_tokenizer_init=True,
        max_num_seqs=args.batch_size * args.num_stages,
        max_model_len=PROMPT_LEN + args.tokens,
        enable_prefix_caching=False,
    )
    tuning = tune_engine(
        config, context_len=PROMPT_LEN + args.tokens // 2, num_rows=args.batch_size, temperature=args.temperature
    )
    measured = tuning.measured
    print(f"\n{name}: {args.num_stages} stages, {measured.num_rows} rows of {measured.context_len} tokens")
    parts = ("layer", "embedding", "lm_head", "sampler", "every_stage")
    print("  " + ", ".join(f"{part} {getattr(measured, part + '_ms'):.3f} ms" for part in parts))
    splits = {"even": list(tuning.even.layers), "tuned": list(tuning.best.layers)}
    speeds: dict[str, list[float]] = {name: [] for name in splits}
    for number in range(args.rounds):
        for split in list(splits) if number % 2 == 0 else reversed(list(splits)):
            speeds[split].append(tokens_per_second(config.with_settings(layer_partition=splits[split]), args))
    predicted = {"even": tuning.even.slowest_ms, "tuned": tuning.best.slowest_ms}
    for split, layers in splits.items():
        runs = " ".join(f"{speed:.0f}" for speed in speeds[split])
        print(
            f"  {split:6} {layers!s:10} predicted {predicted[split]:.2f} ms a step; "
            f"{statistics.median(speeds[split]):.0f} tokens/s (median of {runs})"
        )
    gain = statistics.median(speeds["tuned"]) / statistics.median(speeds["even"]) - 1
    print(f"  gain {gain:+.1%}, predicted {tuning.gain_over(tuning.even):+.1%}")


def tokens_per_second(config: EngineConfig, args: argparse.Namespace) -> float:
    """Return the speed of an engine whose cohorts are full all the time."""
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1 + index] * PROMPT_LEN} for index in range(config.scheduler.max_num_seqs)]
    with LLM(config) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=8, temperature=args.temperature, ignore_eos=True))
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started_s
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    main()
