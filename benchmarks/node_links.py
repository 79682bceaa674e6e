"""What a link between two nodes adds to a token and to a prompt, beside what arithmetic says.

    python benchmarks/node_links.py --links 0:0 10:0.5 1:2 --members 2

Two stages on two nodes of `tools/node_bed.py`, which says what it needs. They take a fixed time per step and per token,
like GPUs that compute, and send hidden states of real size: 8,192 bytes per token, those of Qwen3-8B, however many
members each has. A link is Gb/s:ms, the delay one way; 0:0 is the wire as fast as it can, which the others are compared
with.

    a token        every step sends hidden states to the next stage and tokens back: 2 delays + bytes / rate
    a long prompt  chunks follow each other; the slower of stage and link sets the pace; 2 delays until the first token

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from workload import exactly, random_prompts, seconds_for

from raypp import LLM
from raypp.testing.fake_stage import FakeModel

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from node_bed import BedError, NodeBed

HIDDEN_SIZE = 2048  # in float32: as many bytes as 4,096 in bfloat16
TOKEN_BYTES = HIDDEN_SIZE * 4
STEP_MS, TOKEN_US = 5.0, 20.0
NUM_TOKENS, BATCHES = 64, (1, 16)
PROMPT_TOKENS, CHUNK_TOKENS = 3584, 512
RUNS = 5
NUM_STAGES = 2


@dataclass(frozen=True)
class TimedStage:
    """A stage factory: hidden states as wide as given, and a time per step and per token."""

    makes_members = True  # each takes the same time

    hidden_size: int
    step_ms: float
    token_us: float

    def __call__(self, spec: Any, config: Any) -> FakeModel:
        """Return the model of one stage."""
        timed = self

        class TimedModel(FakeModel):
            hidden_size = timed.hidden_size

            def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
                wide = torch.zeros(len(input_ids), timed.hidden_size)
                wide[:, 0] = input_ids
                return wide

            def forward(self, hidden: torch.Tensor, *args: Any, **others: Any) -> torch.Tensor:
                self._step_s = (timed.step_ms + len(hidden) * timed.token_us / 1e3) / 1e3
                return super().forward(hidden, *args, **others)

            def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
                logits = super().compute_logits(hidden[:, :1])
                own = logits[:, spec.rank * spec.num_logits : (spec.rank + 1) * spec.num_logits]
                return own if out is None else out.copy_(own)

        return TimedModel(0.0, config.vocab_size)


def predicted_ms(
    alone: dict[str, float], gbits: float, delay_ms: float, batches: Sequence[int] = BATCHES
) -> dict[str, float]:
    """Return what each figure becomes over a link.

    Args:
        alone: The figures, ms, where the link takes no time.
        gbits: The link's rate, Gb/s; 0: so high that it does not count.
        delay_ms: One way.
        batches: Numbers of requests.
    """

    def wire_ms(tokens: float) -> float:
        return tokens * TOKEN_BYTES * 8 / gbits / 1e6 if gbits else 0.0

    predicted = {}
    for count in batches:
        rows = max(count // NUM_STAGES, 1)  # of a cohort
        predicted[_token(count)] = alone[_token(count)] + 2 * delay_ms + wire_ms(rows)
    stage_ms = STEP_MS + CHUNK_TOKENS * TOKEN_US / 1e3
    link_is_slower_ms = NUM_STAGES * stage_ms + wire_ms(PROMPT_TOKENS)
    predicted[_PROMPT] = 2 * delay_ms + max(alone[_PROMPT] + wire_ms(CHUNK_TOKENS), link_is_slower_ms)
    return predicted


_PROMPT = f"first token of {PROMPT_TOKENS:,}"


def _token(count: int) -> str:
    return f"a token at {count}"


def measure(llm: LLM, batches: Sequence[int]) -> dict[str, float]:
    """Return the best milliseconds per token at each number of requests, and to the first token of a long prompt."""
    rng, figures = random.Random(0), {}
    vocab_size = llm.plan()["vocab_size"]
    for count in batches:
        runs = []
        for _ in range(RUNS):
            outputs = llm.generate(random_prompts(count, 4, vocab_size, rng), exactly(NUM_TOKENS))
            metrics = [output.metrics for output in outputs]
            spans = [each.finish_time_s - each.first_token_time_s for each in metrics]
            runs.append(statistics.median(spans) * 1e3 / (NUM_TOKENS - 1))
        figures[_token(count)] = min(runs)
    prompts = [seconds_for(llm, random_prompts(1, PROMPT_TOKENS, vocab_size, rng), 1) * 1e3 for _ in range(RUNS + 1)]
    figures[_PROMPT] = min(prompts[1:])
    return figures


def _on_the_node(num_members: int, batches: Sequence[int]) -> None:
    with LLM(
        "tiny",
        num_stages=NUM_STAGES,
        tensor_parallel_size=num_members,
        placement="strict_spread",
        stage_factory=TimedStage(HIDDEN_SIZE, STEP_MS, TOKEN_US),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_num_batched_tokens=CHUNK_TOKENS,
        min_prefill_chunk_tokens=CHUNK_TOKENS,
    ) as llm:
        measure(llm, batches)  # what is slow once
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure(llm, batches)), flush=True)


def measure_links(
    links: list[tuple[float, float]], num_members: int = 1, batches: Sequence[int] = BATCHES
) -> dict[str, dict[str, dict[str, float]]]:
    """Return measured and predicted milliseconds by link, and print them.

    Args:
        links: Gb/s and ms, the first one 0, 0.
        num_members: Of each stage.
        batches: Numbers of requests.

    Raises:
        BedError: this machine can hold no nodes, or the engine did not start.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{TOKEN_BYTES:,} bytes per token and edge; stages of {STEP_MS:g} ms + {TOKEN_US:g} us per token")
    with NodeBed(NUM_STAGES) as bed:
        command = [sys.executable, __file__, "--on-the-node", "--members", str(num_members)]
        command += ["--requests", *map(str, batches)]
        program = bed.start(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if program.stdout.readline() != "ready\n":
            raise BedError("no engine on the bed; what it printed says why")
        for gbits, delay_ms in links:
            bed.wire.gbits, bed.wire.delay_ms = gbits, delay_ms
            program.stdin.write("measure\n")
            program.stdin.flush()
            measured = json.loads(program.stdout.readline())
            alone = next(iter(found.values()))["measured"] if found else measured
            predicted = predicted_ms(alone, gbits, delay_ms, batches)
            name = f"{gbits:g} Gb/s, {delay_ms:g} ms" if gbits or delay_ms else "the wire alone"
            found[name] = {"measured": measured, "predicted": predicted}
            texts = (f"{what} {ms:.2f} ms (predicted {predicted[what]:.2f})" for what, ms in measured.items())
            print(f"{name}: {'; '.join(texts)}", flush=True)
        bed.wire.gbits = bed.wire.delay_ms = 0.0
        program.stdin.close()
        program.wait(60)
        program.stdout.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["0:0", "10:0.5", "1:2"], metavar="GBITS:MS")
    parser.add_argument("--members", type=int, default=1, metavar="N", help="of each stage")
    parser.add_argument("--requests", type=int, nargs="+", default=BATCHES, metavar="N", help="at once")
    parser.add_argument("--on-the-node", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_the_node:
        _on_the_node(args.members, args.requests)
        return
    links = [tuple(map(float, link.split(":"))) for link in args.links]
    print(json.dumps(measure_links([(gbits, delay_ms) for gbits, delay_ms in links], args.members, args.requests)))


if __name__ == "__main__":
    main()
