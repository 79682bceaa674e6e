"""raypp in bf16 against transformers in bf16 and in float32, on the same weights and the same text.

    python benchmarks/bf16_agreement.py                      on GPUs, two stages; on one GPU: --stage-num-gpus 0.5
    python benchmarks/bf16_agreement.py --models tiny --device cpu

raypp continues prompts greedily, and tells the log-probabilities of its most likely tokens for prompts (chunks) and for
what it generates (decode steps). Transformers then reads the same texts, so that all three are asked the same at every
position. Errors are differences to float32.

`tiny` is a trained model. It reads Python, and then what it wrote itself: of that it is nearly always sure, so that all
positions count, not the clear ones alone. Others have random weights: where nothing was learnt many tokens are about
equally likely, and which one wins is rounding. So the rows of the LM head differ in length, log-normally: as in trained
models few tokens compete. What agreeing is worth then is told by the figures beside, see `agreement.py`. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from agreement import NUM_REPORTED, Agreement, Position, agreement_of
from report import GrowingReport, resolved_config
from workload import model_settings

import raypp
from raypp import LLM, SamplingParams
from raypp.api.tokenizer import Tokenizer
from raypp.models.registry import resolve_model_path
from raypp.types import RequestOutput

_HEAD_SPREAD, _HEAD_SCALE = 1.0, 0.25
"""Standard deviation of the logarithm of the LM head's row lengths, and a factor: the most likely token then has a
probability of about 0.8 with 1,024 hidden dimensions."""

_TRAINED = "tiny"
_GIVEN, _OWN = "given text", "its own text"
"""What a model reads: what it is given, or what it wrote."""


def make_checkpoint(name: str, num_layers: int | None, device: str, folder: Path) -> Path:
    """Write a model of a published shape with random weights in bf16, and return where.

    Args:
        name: A folder of benchmarks/models.
        num_layers: Fewer than the shape has; None: all.
        device: To make them on.
        folder: To write to.
    """
    config = transformers.AutoConfig.from_pretrained(model_settings(name)["model"])
    config.tie_word_embeddings = False  # its head is not like an embedding
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
        head = model.lm_head.weight
        head.mul_(_HEAD_SCALE * torch.exp(_HEAD_SPREAD * torch.randn(len(head), 1)))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts_for(name: str, path: Path, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts of exactly `length` tokens: Python for `tiny`, random ids for others."""
    if name != _TRAINED:
        rng = random.Random(0)
        return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    text = "\n".join(file.read_text() for file in sorted(Path(raypp.__file__).parent.glob("**/*.py")))
    ids = Tokenizer(str(path)).encode([text[: 8 * count * length]])[0]
    return [ids[start : start + length] for start in range(0, count * length, length)]


def run_raypp(args: argparse.Namespace, name: str, path: Path, report: GrowingReport) -> dict[str, list[RequestOutput]]:
    """Return what raypp generates, with log-probabilities, by whose text it reads."""
    with LLM(
        str(path),
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
        prompts = prompts_for(name, path, args.prompts, args.prompt_len, llm.plan()["vocab_size"])
        params = SamplingParams(
            max_tokens=args.output_len,
            temperature=0.0,
            ignore_eos=True,
            logprobs=NUM_REPORTED,
            prompt_logprobs=NUM_REPORTED,
        )
        given = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        if name != _TRAINED:
            return {_GIVEN: given}
        own = llm.generate([{"prompt_token_ids": output.outputs[0].token_ids} for output in given], params)
        return {_GIVEN: given, _OWN: own}


@torch.inference_mode()
def logprobs_of(path: Path, dtype: torch.dtype, device: str, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return transformers' log-probabilities after every token of each text, each [T, V] float32 on the CPU."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").to(device)
    found = []
    for text in texts:
        logits = model(input_ids=torch.tensor([text], device=device)).logits[0].float()
        found.append(logits.log_softmax(-1).cpu())
    return found


def compare(
    args: argparse.Namespace, path: Path, outputs: Sequence[RequestOutput], *, counts_all: bool
) -> tuple[Agreement, Agreement]:
    """Return the agreement over prompts, and over what was generated; `counts_all`: as of `agreement_of`."""
    in_prompts, in_outputs = [], []
    for start in range(0, len(outputs), args.prompts_at_once):
        some = outputs[start : start + args.prompts_at_once]
        texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in some]
        others = logprobs_of(path, torch.bfloat16, args.device, texts)
        exacts = logprobs_of(path, torch.float32, args.device, texts)
        for output, other, exact in zip(some, others, exacts, strict=True):
            of_prompt, of_output = output.prompt_logprobs, output.outputs[0].logprobs
            assert of_prompt is not None
            assert of_output is not None
            said = [*of_prompt[1:], *of_output]  # of the token after each position
            positions = [Position(logprobs, other[at], exact[at]) for at, logprobs in enumerate(said) if logprobs]
            in_prompts += positions[: len(of_prompt) - 1]
            in_outputs += positions[len(of_prompt) - 1 :]
    return agreement_of(in_prompts, counts_all=counts_all), agreement_of(in_outputs, counts_all=counts_all)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "qwen3-0.6b", "qwen3-8b:4"], help="NAME or NAME:LAYERS")
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
    for model in args.models:
        started = time.perf_counter()
        name, _, num_layers = model.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            is_random = model_settings(name).get("load_format") == "dummy"
            path = (
                make_checkpoint(name, int(num_layers or 0) or None, args.device, Path(folder))
                if is_random
                else Path(resolve_model_path(name))
            )
            _free_memory()
            figures = {}
            for text, outputs in run_raypp(args, name, path, report).items():
                in_prompts, in_outputs = compare(args, path, outputs, counts_all=text == _OWN)
                figures[text] = {"prompts": in_prompts.figures(), "decode": in_outputs.figures()}
                print(f"{model}, {text}, prompts: {in_prompts}\n{model}, {text}, decode steps: {in_outputs}")
                all_good = all_good and in_prompts.is_good and in_outputs.is_good
        _free_memory()
        report.put(model, figures)
        print(f"  took {time.perf_counter() - started:.0f} s", flush=True)
    report.print()
    raise SystemExit(not all_good)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
