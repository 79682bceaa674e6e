"""`raypp generate`: continue prompts, or ask about images, and print the texts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from raypp.api.launch import load_tokenizer
from raypp.cli.engine_options import add_engine_options, engine_config
from raypp.cli.sampling_options import add_sampling_options, given_sampling
from raypp.config.engine_config import EngineConfig
from raypp.errors import RequestError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import open_image
from raypp.pictures.web_address import is_web_address
from raypp.types import CompletionOutput, Logprobs, RequestOutput, SamplingParams


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue prompts. Texts go to stdout, in order, each ended by a newline; on a terminal "
        "the prompt comes before its text. Logs go to stderr.",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="what to continue; - reads it from stdin; may be repeated",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="an image that each prompt asks about; may be repeated. Prompts are then questions of a conversation",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per continuation and line")
    add_sampling_options(
        parser, "defaults are those of the model's generation_config.json, then of raypp.SamplingParams"
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    given = given_sampling(args)
    SamplingParams(**given)  # so that mistakes raise before an engine starts
    config = engine_config(args)
    prompts = _read_prompts(args.prompt)
    _check_prompts(config, prompts, args.image)
    with args.entry_points.open_llm(config) as llm:
        params = SamplingParams(**{**llm.sampling_defaults, **given})
        if args.image:
            outputs = llm.chat([_question(prompt, args.image) for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
    for output in outputs:
        for completion in output.outputs:
            print(_as_json(output, completion) if args.json else _text(output, completion, is_answer=bool(args.image)))
    return 0


def _check_prompts(config: EngineConfig, prompts: Sequence[str], images: Sequence[str]) -> None:
    """Refuse what no engine of this model could take, before one starts.

    Raises:
        RequestError: images for a model that takes none, a file that is no image, a prompt without tokens.
    """
    if images:
        settings = config.model
        path, trusts_code = resolve_model_path(settings.model, settings.revision), settings.trust_remote_code
        has_tower = load_model_config(path, impl=settings.model_impl, trusts_code=trusts_code).vision is not None
        if not (has_tower and config.encoder.num_encoders):
            raise RequestError(
                "this model takes no images",
                got=f"--image {images[0]}" + (", num_encoders=0" if has_tower else ""),
                expected="text only",
                hint="leave --image out, or choose a model with vision, such as tiny-vl, and num_encoders >= 1",
            )
        fetcher = Fetcher(config.images)
        for image in images:
            if not is_web_address(image):
                open_image(image, fetcher)
    elif "" in prompts and (tokenizer := load_tokenizer(config)) is not None and not len(tokenizer.encode([""])[0]):
        raise RequestError(
            "a prompt has no tokens", got="--prompt ''", expected="a text of at least one token", hint="give a text"
        )


def _text(output: RequestOutput, completion: CompletionOutput, *, is_answer: bool) -> str:
    """Return what is printed: on a terminal after the prompt that it continues, for scripts the continuation alone.

    Args:
        output: Of the request.
        completion: One of its continuations.
        is_answer: Whether it answers a question instead of going on with a text.
    """
    begins = "" if is_answer or not sys.stdout.isatty() else output.prompt or ""
    return begins + completion.text


def _question(prompt: str, images: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation that shows images and asks about them."""
    pictures = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": prompt}]}]


def _read_prompts(given: Sequence[str]) -> list[str]:
    """Return the prompts, `-` replaced by what stdin holds, without the newline that ends its last line."""
    stdin = sys.stdin.read().removesuffix("\n") if "-" in given else ""
    return [stdin if prompt == "-" else prompt for prompt in given]


def _as_json(output: RequestOutput, completion: CompletionOutput) -> str:
    values: dict[str, Any] = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "metrics": asdict(output.metrics),
    }
    if completion.logprobs is not None:
        values["cumulative_logprob"] = completion.cumulative_logprob
        values["logprobs"] = [_plain(of_token) for of_token in completion.logprobs]
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [of_token and _plain(of_token) for of_token in output.prompt_logprobs]
    return json.dumps(values)


def _plain(logprobs: Logprobs) -> dict[int, dict[str, Any]]:
    return {token_id: entry._asdict() for token_id, entry in logprobs.items()}
