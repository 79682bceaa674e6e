"""What a link between two nodes adds to a token and to a prompt, beside what arithmetic says.

    python benchmarks/node_links.py --links 0:0 10:0.5 1:2 --members 2
    python benchmarks/node_links.py --model qwen3-8b --links 0:0 25:0 10:0 1:0 --requests 1 16 64

Two stages on two nodes of `tools/node_bed.py`, which says what it needs. A link is Gb/s:ms, the delay one way; 0:0 is
as fast as it can, which the others are compared with. Without a model, stages take a fixed time per step and per token,
like GPUs that compute, and send hidden states of real size: 8,192 bytes per token, those of Qwen3-8B, however many
members each has. A model has a GPU on each node; NCCL takes the bed's cable, which has no delay of its own.

    a token        every step sends hidden states to the next stage and tokens back: 2 delays + bytes / rate
    a long prompt  chunks follow each other; the slower of stage and link sets the pace; 2 delays until the first token

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import print_report
from workload import exactly, model_settings, random_prompts, seconds_for

from raypp import LLM
from raypp.models.config import load_model_config
from raypp.testing.fake_stage import FakeModel

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from node_bed import BedError, NodeBed

HIDDEN_SIZE = 2048  # in float32: as many bytes as 4,096 in bfloat16
STEP_MS, TOKEN_US = 5.0, 20.0
NUM_TOKENS, BATCHES = 64, (1, 16)
NUM_STAGES = 2
THROUGH_THE_CABLE = {
    "NCCL_SOCKET_IFNAME": "cable",
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}
"""For GPUs of one host, which could reach each other by shorter ways."""


@dataclass(frozen=True)
class Traffic:
    """What is measured.

    Args:
        input_len: Tokens of the prompts of requests that decode.
        prompt_tokens: Of the long prompt.
        chunk_tokens: The most tokens of a step.
        ends: Tokens of the long prompt's first chunk, and of its last one.
        runs: Of which the best counts.
        token_bytes: Of a token's hidden states.
    """

    input_len: int
    prompt_tokens: int
    chunk_tokens: int
    ends: tuple[int, int]
    runs: int
    token_bytes: int

    @classmethod
    def of(cls, model: str | None) -> Traffic:
        """Return that of a model of benchmarks/models; None: of timed stages."""
        if model is None:
            return OF_TIMED_STAGES
        config = load_model_config(Path(model_settings(model)["model"]))
        # `raypp.scheduler.step_budget` cuts 32,000 tokens on two stages into 24 chunks: 4,096, 3,584, ... 256.
        return cls(64, 32_000, 8192, (4096, 256), 3, 2 * config.hidden_size)


OF_TIMED_STAGES = Traffic(4, 3584, 512, (512, 512), 5, HIDDEN_SIZE * 4)


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
    alone: dict[str, float],
    gbits: float,
    delay_ms: float,
    batches: Sequence[int] = BATCHES,
    traffic: Traffic = OF_TIMED_STAGES,
) -> dict[str, float]:
    """Return what each figure becomes over a link.

    Args:
        alone: The figures, ms, where the link takes no time.
        gbits: The link's rate, Gb/s; 0: so high that it does not count.
        delay_ms: One way.
        batches: Numbers of requests.
        traffic: What was measured.
    """

    def wire_ms(tokens: float) -> float:
        return tokens * traffic.token_bytes * 8 / gbits / 1e6 if gbits else 0.0

    predicted = {}
    for count in batches:
        rows = max(count // NUM_STAGES, 1)  # of a cohort
        predicted[_token(count)] = alone[_token(count)] + 2 * delay_ms + wire_ms(rows)
    name, num_tokens, (first, last) = _prompt(traffic), traffic.prompt_tokens, traffic.ends
    ends_ms = alone[name] * (first + last) / (num_tokens + last)  # the first chunk on one stage, the last on the other
    predicted[name] = 2 * delay_ms + max(alone[name] + wire_ms(last), ends_ms + wire_ms(num_tokens))
    return predicted


def _prompt(traffic: Traffic) -> str:
    return f"first token of {traffic.prompt_tokens:,}"


def _token(count: int) -> str:
    return f"a token at {count}"


def measure(llm: LLM, batches: Sequence[int], traffic: Traffic) -> dict[str, float]:
    """Return the best milliseconds per token at each number of requests, and to the first token of a long prompt."""
    rng, figures = random.Random(0), {}
    vocab_size = llm.plan()["vocab_size"]
    for count in batches:
        runs = []
        for _ in range(traffic.runs):
            outputs = llm.generate(random_prompts(count, traffic.input_len, vocab_size, rng), exactly(NUM_TOKENS))
            metrics = [output.metrics for output in outputs]
            spans = [each.finish_time_s - each.first_token_time_s for each in metrics]
            runs.append(statistics.median(spans) * 1e3 / (NUM_TOKENS - 1))
        figures[_token(count)] = min(runs)
    prompts = [
        seconds_for(llm, random_prompts(1, traffic.prompt_tokens, vocab_size, rng), 1) * 1e3
        for _ in range(traffic.runs + 1)
    ]
    figures[_prompt(traffic)] = min(prompts[1:])
    return figures


def _on_the_node(num_members: int, batches: Sequence[int], model: str | None) -> None:
    traffic = Traffic.of(model)
    what = {"model": "tiny", "stage_factory": TimedStage(HIDDEN_SIZE, STEP_MS, TOKEN_US)}
    what |= {"min_prefill_chunk_tokens": traffic.chunk_tokens}
    if model is not None:
        what = {**model_settings(model), "max_model_len": 32_768}
    with LLM(
        **what,
        num_stages=NUM_STAGES,
        tensor_parallel_size=num_members,
        placement="strict_spread",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_num_batched_tokens=traffic.chunk_tokens,
    ) as llm:
        measure(llm, batches, traffic)  # what is slow once
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure(llm, batches, traffic)), flush=True)


def measure_links(
    links: list[tuple[float, float]], num_members: int = 1, batches: Sequence[int] = BATCHES, model: str | None = None
) -> dict[str, dict[str, dict[str, float]]]:
    """Return measured and predicted milliseconds by link, and print them.

    Args:
        links: Gb/s and ms, the first one 0, 0.
        num_members: Of each stage.
        batches: Numbers of requests.
        model: Of benchmarks/models, with a GPU on each node; None: timed stages.

    Raises:
        BedError: this machine can hold no nodes, or the engine did not start.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    what = f"stages of {STEP_MS:g} ms + {TOKEN_US:g} us per token" if model is None else model
    traffic = Traffic.of(model)
    print(f"{traffic.token_bytes:,} bytes per token and edge; {what}")
    gpus = {} if model is None else {node: {"CUDA_VISIBLE_DEVICES": gpu} for node, gpu in enumerate(_visible_gpus())}
    with NodeBed(NUM_STAGES, environments=gpus, has_cable=model is not None) as bed:
        command = [sys.executable, __file__, "--on-the-node", "--members", str(num_members)]
        command += ["--requests", *map(str, batches), *(["--model", model] if model else [])]
        variables = THROUGH_THE_CABLE if model else {}
        program = bed.start(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        if program.stdout.readline() != "ready\n":
            raise BedError("no engine on the bed; what it printed says why")
        for gbits, delay_ms in links:
            if model is None:
                bed.wire.gbits, bed.wire.delay_ms = gbits, delay_ms
            else:
                bed.set_cable_rate(gbits)
            program.stdin.write("measure\n")
            program.stdin.flush()
            measured = json.loads(program.stdout.readline())
            alone = next(iter(found.values()))["measured"] if found else measured
            predicted = predicted_ms(alone, gbits, delay_ms, batches, traffic)
            name = f"{gbits:g} Gb/s, {delay_ms:g} ms" if gbits or delay_ms else "as fast as it can"
            found[name] = {"measured": measured, "predicted": predicted}
            texts = (f"{what} {ms:.2f} ms (predicted {predicted[what]:.2f})" for what, ms in measured.items())
            print(f"{name}: {'; '.join(texts)}", flush=True)
        bed.wire.gbits = bed.wire.delay_ms = 0.0
        program.stdin.close()
        program.wait(60)
        program.stdout.close()
    return found


def _visible_gpus() -> list[str]:
    """Return a GPU for each node, as CUDA_VISIBLE_DEVICES names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:NUM_STAGES]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", metavar="GBITS:MS", help="the first one 0:0")
    parser.add_argument("--members", type=int, default=1, metavar="N", help="of each stage")
    parser.add_argument("--requests", type=int, nargs="+", default=BATCHES, metavar="N", help="at once")
    parser.add_argument("--model", help="a folder of benchmarks/models: on GPUs")
    parser.add_argument("--on-the-node", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_the_node:
        _on_the_node(args.members, args.requests, args.model)
        return
    args.links = args.links or (["0:0", "25:0", "10:0", "1:0"] if args.model else ["0:0", "10:0.5", "1:2"])
    pairs = [tuple(map(float, link.split(":"))) for link in args.links]
    if args.model and (delayed := [link for link, (_, delay_ms) in zip(args.links, pairs, strict=True) if delay_ms]):
        parser.error(f"--links {' '.join(delayed)}: a cable has no delay; with --model, GBITS:0 is allowed")
    if args.model and args.members > 1:
        parser.error(f"--members {args.members} --model: members would take the cable, too; 1 is allowed")
    if any(pairs[0]):
        parser.error(f"--links {args.links[0]} ...: the others are compared with the first one; 0:0 is allowed")
    links = [(gbits, delay_ms) for gbits, delay_ms in pairs]
    figures = measure_links(links, args.members, args.requests, args.model)
    print_report("node_links", vars(args), figures)


if __name__ == "__main__":
    main()
