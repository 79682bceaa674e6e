"""raypp in bf16 against transformers in bf16 and in float32, on the same weights and the same text.

    python benchmarks/bf16_agreement.py                      on GPUs, two stages; on one GPU: --stage-num-gpus 0.5
    python benchmarks/bf16_agreement.py --models tiny --device cpu
    python benchmarks/bf16_agreement.py --models qwen3-8b:4 qwen3-0.6b=dummy build/trained

raypp continues prompts greedily, and tells the log-probabilities of its most likely tokens for prompts (chunks) and for
what it generates (decode steps). Transformers then reads the same texts, so that all three are asked the same at every
position. Errors are differences to float32. As a control transformers in bf16 reads them once more, with another
attention ("eager" instead of "sdpa").

`tiny` is a trained model, and so is every other that is no folder of benchmarks/models, such as a folder that
`tools/training/train_tiny.py --shape` wrote. It reads Python, raypp's own sources, and then what it wrote itself: of
that it is nearly always sure, so that all positions count, not the clear ones alone.

NAME or NAME:LAYERS is a shape of benchmarks/models with random weights, and it reads random tokens: where nothing was
learnt many tokens are about equally likely, and which one wins is rounding. So the rows of the LM head differ in
length, log-normally: as in trained models few tokens compete. With `=dummy` behind it has the plain weights instead
that raypp's load_format="dummy" makes, as in the other benchmarks. What agreeing is worth is told by the figures
beside, see `agreement.py`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from agreement import NUM_REPORTED, Agreement, Position, agreement_of
from report import GrowingReport, resolved_config
from workload import model_settings

import raypp
from raypp import LLM, SamplingParams
from raypp.api.tokenizer import Tokenizer
from raypp.models.registry import resolve_model_path
from raypp.models.weights import DummyWeights
from raypp.types import RequestOutput

_HEAD_SPREAD, _HEAD_SCALE = 1.0, 0.25
"""Standard deviation of the logarithm of the LM head's row lengths, and a factor: the most likely token then has a
probability of about 0.8 with 1,024 hidden dimensions."""

_GIVEN, _OWN = "given text", "its own text"
"""What a model reads: what it is given, or what it wrote."""


class Model(NamedTuple):
    """A checkpoint on disk."""

    path: Path
    is_trained: bool


def make_model(spec: str, device: str, folder: Path) -> Model:
    """Return a trained model, or write one with random weights.

    Args:
        spec: What `LLM` takes as a trained model, or a folder of benchmarks/models as `NAME[:LAYERS][=dummy]`.
        device: To make random weights on.
        folder: To write them to.

    Raises:
        ModelLoadError: it is neither.
        ValueError: weights are asked for that nobody makes.
    """
    sizes, _, weights = spec.partition("=")
    name, _, num_layers = sizes.partition(":")
    settings = model_settings(name)
    if settings.get("load_format") != "dummy":
        return Model(Path(resolve_model_path(spec)), is_trained=True)
    if weights not in ("", "dummy"):
        raise ValueError(f"the random weights of {spec!r} are {weights!r}, expected dummy or nothing")
    write_checkpoint(settings["model"], int(num_layers or 0) or None, weights == "dummy", device, folder)
    return Model(folder, is_trained=False)


def write_checkpoint(shape: str, num_layers: int | None, is_dummy: bool, device: str, folder: Path) -> None:
    """Write a model of a published shape with random weights in bf16.

    Args:
        shape: The folder of its config.json.
        num_layers: Fewer than the shape has; None: all.
        is_dummy: Make the weights of load_format="dummy", and tie the embeddings as the shape does; else a head of
            its own whose rows differ in length.
        device: To make them on.
        folder: To write to.
    """
    config = transformers.AutoConfig.from_pretrained(shape)
    config.tie_word_embeddings = config.tie_word_embeddings and is_dummy  # the other head is not like an embedding
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (_fill_as_dummy if is_dummy else _spread)(model)
    model.to(torch.bfloat16).save_pretrained(folder)


@torch.no_grad()
def _fill_as_dummy(model: Any) -> None:
    weights = DummyWeights(seed=0)
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.get(name, tuple(parameter.shape), torch.bfloat16))


@torch.no_grad()
def _spread(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
    head = model.lm_head.weight
    head.mul_(_HEAD_SCALE * torch.exp(_HEAD_SPREAD * torch.randn(len(head), 1, device=head.device)))


def prompts_for(model: Model, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of exactly `length` tokens: Python for a trained model, random ids for others."""
    if not model.is_trained:
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    text = "\n".join(file.read_text() for file in sorted(Path(raypp.__file__).parent.glob("**/*.py")))
    ids = Tokenizer(str(model.path)).encode([text[: 8 * count * length]])[0].tolist()
    return [ids[start : start + length] for start in range(0, count * length, length)]


def run_raypp(args: argparse.Namespace, model: Model, report: GrowingReport) -> dict[str, list[RequestOutput]]:
    """Return what raypp generates, with log-probabilities, by whose text it reads."""
    with LLM(
        str(model.path),
        num_stages=args.num_stages,
        device=args.device,
        dtype="bfloat16",
        stage_num_gpus=args.stage_num_gpus,
        gpu_memory_utilization=0.6,  # this process has made the weights on the same GPU
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=args.prompts,
        max_model_len=max(args.prompt_len, args.output_len) + args.output_len,
        mode=args.mode,
        load_format="auto",
    ) as llm:
        report.note_config(resolved_config(llm))
        prompts = prompts_for(model, args.prompts, args.prompt_len, llm.plan()["vocab_size"])
        params = SamplingParams(
            max_tokens=args.output_len,
            temperature=0.0,
            ignore_eos=True,
            logprobs=NUM_REPORTED,
            prompt_logprobs=NUM_REPORTED,
        )
        given = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        if not model.is_trained:
            return {_GIVEN: given}
        own = llm.generate([{"prompt_token_ids": output.outputs[0].token_ids} for output in given], params)
        return {_GIVEN: given, _OWN: own}


@torch.inference_mode()
def logprobs_of(
    path: Path, dtype: torch.dtype, device: str, texts: Sequence[list[int]], attention: str = "sdpa"
) -> Iterator[torch.Tensor]:
    """Yield transformers' log-probabilities after every token of each text, each [T, V] float32 on the CPU."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    model.to(device)
    for text in texts:
        logits = model(input_ids=torch.tensor([text], device=device)).logits[0].float()
        yield logits.log_softmax(-1).cpu()


def compare(
    args: argparse.Namespace, path: Path, outputs: Sequence[RequestOutput], *, counts_all: bool
) -> tuple[Agreement, Agreement]:
    """Return the agreement over prompts, and over what was generated; `counts_all`: as of `agreement_of`."""
    in_prompts, in_outputs = [], []
    texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    agains = [each.argmax(-1).tolist() for each in logprobs_of(path, torch.bfloat16, args.device, texts, "eager")]
    for start in range(0, len(outputs), args.prompts_at_once):
        part = slice(start, start + args.prompts_at_once)
        others = list(logprobs_of(path, torch.bfloat16, args.device, texts[part]))
        exacts = logprobs_of(path, torch.float32, args.device, texts[part])
        for output, other, exact, again in zip(outputs[part], others, exacts, agains[part], strict=True):
            of_prompt, of_output = output.prompt_logprobs, output.outputs[0].logprobs
            assert of_prompt is not None
            assert of_output is not None
            said = [*of_prompt[1:], *of_output]  # of the token after each position
            positions = [
                Position(logprobs, other[at], exact[at], again[at]) for at, logprobs in enumerate(said) if logprobs
            ]
            in_prompts += positions[: len(of_prompt) - 1]
            in_outputs += positions[len(of_prompt) - 1 :]
    return agreement_of(in_prompts, counts_all=counts_all), agreement_of(in_outputs, counts_all=counts_all)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "qwen3-0.6b", "qwen3-8b:4"], help="see above")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--stage-num-gpus", type=float, default=1.0)
    parser.add_argument("--mode", default="auto", help="of graphs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompts-at-once", type=int, default=4, help="that transformers' answers are kept of")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--out", type=Path, help="a JSON file, written after every model")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    report = GrowingReport("bf16_agreement", vars(args), args.out)
    all_good = True
    for spec in args.models:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(spec, args.device, Path(folder))
            _free_memory()
            figures = {}
            for text, outputs in run_raypp(args, model, report).items():
                in_prompts, in_outputs = compare(args, model.path, outputs, counts_all=text == _OWN)
                figures[text] = {"prompts": in_prompts.figures(), "decode": in_outputs.figures()}
                print(f"{spec}, {text}, prompts: {in_prompts}\n{spec}, {text}, decode steps: {in_outputs}")
                all_good = all_good and in_prompts.is_good and in_outputs.is_good
        _free_memory()
        report.put(spec, figures)
        print(f"  took {time.perf_counter() - started:.0f} s", flush=True)
    report.print()
    raise SystemExit(not all_good)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
