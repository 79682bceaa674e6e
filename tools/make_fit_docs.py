"""Write docs/fit.md, what fits where, from the plans that `raypp info --gpus` makes.

python tools/make_fit_docs.py            writes it
python tools/make_fit_docs.py --check    exits 1 if it is not current
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated_pages import write_or_check

from raypp.cli.info import fit_lines
from raypp.config.engine_config import EngineConfig
from raypp.plan.fit import REQUEST_LENGTHS, Fit, check_fit, describe_fit
from raypp.plan.hardware import described_hardware, read_machines

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "fit.md"
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")
MACHINES = (
    ("2x24GB", "2 x 24 GB"),
    ("2x80GB", "2 x 80 GB"),
    ("2x24GB+2x24GB", "4 x 24 GB on two machines"),
)

_PAGE = """\
# What fits where

Written by `tools/make_fit_docs.py` from the plans of `raypp info`; change it there.

`raypp info` answers "does it fit?" for a model and GPUs, without starting anything. It reads the model's config.json
alone: of a Hugging Face id it downloads that file, no weights.

<!-- not run: downloads config.json -->
```sh
raypp info Qwen/Qwen3-8B --num-stages 2                  # for the GPUs of this machine
raypp info Qwen/Qwen3-8B --num-stages 2 --gpus 2x24GB    # for others: no GPU is needed
```

Without a network, name a directory that holds config.json. Some are in `benchmarks/models`:

```sh
raypp info benchmarks/models/qwen3-14b --num-stages 4 --gpus 2x24GB+2x24GB
```

`2x24GB` are two GPUs of 24 GB in one machine, `2x24GB+2x24GB` two such machines. A GPU without a number belongs to the
machine before it: `16GB+32GB` is one machine with two GPUs, `2x24GB+48GB` one with three. Where GPUs differ and stages
take all of them, [each counts as what it is](choosing_stages.md#gpus-that-differ). It takes the same options and files
as `raypp serve`. The exit code is 0 if the model fits and 1 if it does not; `--json` prints all of it.

## Models and machines

Weights and KV cache in bfloat16, a stage per GPU, all other settings at their defaults. A request's tokens are its
prompt and its output together; at most `max_num_seqs` requests, 256 by default, run at once, more wait.

{table}

`configs/2x24gb.toml`, `configs/2x80gb.toml` and `configs/4x24gb-two-machines.toml` are configurations for these
machines; the comment at their top says what fits with their settings.

## How to read the answer

```text
{example}
```

Each stage holds its layers' weights and the KV cache of these layers. `may use` is the GPU's memory times
`gpu_memory_utilization`. What weights, a step's tensors, graphs and libraries leave of it is KV cache, as many
blocks on every stage as the fullest one has room for; the others have some memory left.

The last table has the numbers of stages and of members (`--tensor-parallel-size`) that the GPUs have room for, members
of a stage on one machine. Its tokens per second are by the cost model: what each member's GPU reads of weights and of
KV, half of 8,192 tokens per request, a fixed time per layer, and where there are members two sums per layer, measured
over NVLink. They compare cuts; they do not promise a speed. What raypp would take is the one with most tokens
per second of all requests that run at once, and of those that are within 3 % the one with the fewest GPUs. On a
machine with several GPUs `raypp serve` without `--num-stages` takes it.

## If it does not fit

`raypp info` then lists changes with which it fits, each checked by a plan of its own. In general:

- More stages or members: each GPU holds less, so that weights shrink and the KV cache grows.
- A smaller `max_model_len`, if the KV cache is too small for one request of the longest length.
- A smaller `max_num_seqs` or `max_num_batched_tokens`: a step's tensors, above all its logits, and graphs shrink.
- Other layers per stage (`layer_partition`): on GPUs that are alike the slowest stage is as fast as can be by default,
  which leaves memory of some stages over. `raypp info` names the layers that hold most, also for a model that fits.
- `quantization = "fp8"`: the layers take half of the memory ([weights in 8 and 4 bits](quantization.md)).
- A larger `gpu_memory_utilization`, 0.95 at most: the rest is for what is not planned.

## What is an estimate

- CUDA graphs and libraries are estimated in every plan, by figures of H200 GPUs. With `--start`
  `raypp info` starts the engine and measures its graphs. The table holds plans: cards of 24 and 80 GB were not run.
- `--gpus` takes 1 GB for 10^9 bytes. Cards have a little more: one sold with 24 GB has 24.1 to 25.8 billion bytes.
  So a real machine holds at least what is said here, if nothing else uses its GPUs.
- Weights and KV cache are exact.
"""


def render() -> str:
    """Return the page."""
    return _PAGE.format(table=_table(), example=_example())


def _table() -> str:
    lengths = [f"{length:,}" for length in REQUEST_LENGTHS]
    head = ["GPUs", "model", "KV cache, tokens", *(f"requests of {length}" for length in lengths), "longest request"]
    rows = [_row(name, model, _fit(gpus, model)) for gpus, name in MACHINES for model in MODELS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _row(name: str, model: str, fit: Fit) -> list[str]:
    if fit.plan is None:
        return [name, model, "does not fit", *["-"] * (len(REQUEST_LENGTHS) + 1)]
    longest = fit.plan.max_model_len
    requests = [f"{fit.num_requests(length):,}" if length <= longest else "-" for length in REQUEST_LENGTHS]
    return [name, model, f"{fit.num_kv_tokens:,}", *requests, f"{longest:,}"]


def _fit(gpus: str, model: str) -> Fit:
    machines = read_machines(gpus)
    num_stages = sum(machine.num_gpus for machine in machines)
    return check_fit(_config(model, num_stages), described_hardware(machines))


def _example() -> str:
    fit = describe_fit(_config(MODELS[0], 2), read_machines("2x24GB"))["fit"]
    return "\n".join(fit_lines({**fit, "model": MODELS[0]}))


def _config(model: str, num_stages: int) -> EngineConfig:
    directory = ROOT / "benchmarks" / "models" / model.rpartition("/")[2].lower()
    return EngineConfig.from_flat(directory, num_stages=num_stages)


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {PATH: lambda _: render()}))
