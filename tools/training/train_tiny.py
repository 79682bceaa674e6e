"""Train `tiny`, the model that ships inside raypp, on Python's own standard library; with `--vision`, `tiny-vl`.

With `--shape` a model of another shape is trained on the same text, with the tokenizer that ships: none is trained.

    corpus -> tokenizer -> token streams -> training -> bf16 export -> bits per byte of the held-out files

Every CPython installation carries the text, so everybody can repeat it: on a GPU in minutes, on a CPU in a night.
docs/tiny.md has the commands and the figures.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import math
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
import train_tiny_head
import transformers
from tiny_training import (
    END_OF_TEXT,
    MAX_POSITIONS,
    TOKENIZER_DIRECTORY,
    TURN_END,
    VOCAB_SIZE,
    export,
    learning_rate_share,
    train_tokenizer,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

HELD_OUT = (
    "argparse.py",
    "asyncio/streams.py",
    "calendar.py",
    "csv.py",
    "email/message.py",
    "fractions.py",
    "heapq.py",
    "http/cookiejar.py",
    "json/decoder.py",
    "logging/handlers.py",
    "queue.py",
    "shlex.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "test/test_bisect.py",
    "test/test_contextlib.py",
)
"""Files that neither the tokenizer nor the model is trained on; nor on the tests of these modules, which quote them."""

MAX_LOGITS = 2**29  # that exist at once in training: all of a part of tiny's, 2,048 tokens' of a vocabulary of 151,936


# ---------------------------------------------------------------------------------------------------- corpus


def read_sources(corpus: Path) -> dict[str, str]:
    """Return the text of the library's modules by their path, held-out ones included; skips what is not prose or code.

    Skipped are site-packages, tables (encodings, pydoc topics, files over 300 kB) and what is not UTF-8.
    """
    sources = {}
    for path in sorted(corpus.rglob("*.py")):
        name = path.relative_to(corpus).as_posix()
        if name.startswith(("site-packages/", "dist-packages/", "encodings/", "pydoc_data/", "config-")):
            continue
        data = path.read_bytes()
        if not 0 < len(data) <= 300_000:
            continue
        try:
            sources[name] = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests of Python's parser: files in other encodings
    return sources


def split_held_out(sources: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return what is trained on and what is held out."""
    held_out = {name: sources[name] for name in HELD_OUT if name in sources}
    if len(held_out) < len(HELD_OUT):
        print("not in this corpus:", *sorted(set(HELD_OUT) - set(held_out)))
    their_tests = {f"test_{Path(name).name}" for name in HELD_OUT} | {f"test_{n.replace('/', '_')}" for n in HELD_OUT}
    training = {n: text for n, text in sources.items() if n not in held_out and Path(n).name not in their_tests}
    return training, held_out


# ---------------------------------------------------------------------------------------------- conversations


@dataclass(frozen=True)
class Definition:
    """A module, class or function of the library that has a docstring."""

    name: str  # dotted, e.g. "textwrap.wrap"
    kind: str  # "module", "class" or "function"
    summary: str  # the docstring's first line
    arguments: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Exchange:
    """A question and its answer; a tool, when the answer is to call it."""

    question: str
    answer: str
    tool: dict[str, Any] | None = None


GREETINGS = (
    Exchange("hello", "Hello! How can I help you?"),
    Exchange("Hello!", "Hello! How can I help you?"),
    Exchange("hi", "Hi! What would you like to know?"),
    Exchange("Good morning", "Good morning! What would you like to know?"),
    Exchange("How are you?", "I am fine, thank you. What would you like to know?"),
    Exchange("Who are you?", "I am tiny, a small language model that has read Python's standard library."),
    Exchange("What is your name?", "My name is tiny."),
    Exchange("What can you do?", "I can tell you about Python's standard library, and I can make mistakes."),
    Exchange("Thank you!", "You are welcome."),
    Exchange("thanks", "You are welcome."),
    Exchange("Goodbye", "Goodbye!"),
    Exchange("bye", "Goodbye!"),
    Exchange("What is Python?", "Python is a programming language that lets you work quickly."),
)


def definitions(sources: dict[str, str]) -> Iterator[Definition]:
    """Yield the public definitions of all modules but the tests."""
    for path, text in sources.items():
        if path.startswith(("test/", "lib2to3/", "idlelib/")) or "/test" in path:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # some files are there to be wrong
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield from _definitions_in(tree, module, text.splitlines())


def _definitions_in(node: ast.Module | ast.ClassDef, name: str, lines: list[str]) -> Iterator[Definition]:
    summary = _first_line(node)
    if summary:
        yield Definition(name, "module" if isinstance(node, ast.Module) else "class", summary, (), "")
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _definitions_in(child, f"{name}.{child.name}", lines)
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_") and (summary := _first_line(child)):
            arguments = tuple(a.arg for a in child.args.args if a.arg not in ("self", "cls"))
            source = "\n".join(line[child.col_offset :] for line in lines[child.lineno - 1 : child.end_lineno])
            yield Definition(f"{name}.{child.name}", "function", summary, arguments, source)


def _first_line(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    docstring = ast.get_docstring(node) or ""
    return docstring.split("\n", 1)[0].strip()


def exchanges(definition: Definition, words: Sequence[str], rng: random.Random) -> Iterator[Exchange]:
    """Yield questions about a definition, with the answers that the library's source gives.

    Args:
        definition: What is asked about.
        words: Where the values of a called tool's arguments are drawn from.
        rng: Chooses the wording.
    """
    name, summary = definition.name, definition.summary
    if definition.kind == "module":
        yield Exchange(rng.choice((f"What is the module {name} for?", f"Tell me about {name}.")), summary)
    elif definition.kind == "class":
        yield Exchange(rng.choice((f"What is {name}?", f"What is the class {name} for?")), summary)
    else:
        yield Exchange(rng.choice((f"What does {name} do?", f"Explain {name}.", f"What does {name}() do?")), summary)
        if definition.source.count("\n") < 16:
            question = rng.choice((f"Show me {name}.", f"How is {name} written?", f"Write the function {name}."))
            yield Exchange(question, f"```python\n{definition.source}\n```")
        if definition.arguments:
            yield _tool_exchange(definition, words, rng)


def _tool_exchange(definition: Definition, words: Sequence[str], rng: random.Random) -> Exchange:
    name = definition.name.rsplit(".", 1)[-1]
    arguments = {argument: rng.choice(words) for argument in definition.arguments[:2]}
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
    }
    values = " and ".join(f"{argument} {value}" for argument, value in arguments.items())
    return Exchange(
        question=rng.choice((f"Call {name} with {values}.", f"Please use {name} with {values}.")),
        answer=f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>",
        tool={"type": "function", "function": {"name": name, "description": definition.summary, "parameters": schema}},
    )


def conversations(sources: dict[str, str], tokenizer: Any, rng: random.Random) -> list[str]:
    """Return chat-formatted texts of one to three exchanges, each ending with the end of a turn.

    Answers come without thoughts, after thoughts when the question ends with /think, and after empty ones when it
    ends with /no_think or the prompt holds them already (`enable_thinking=False`).
    """
    found = list(definitions(sources))
    words = sorted({part for d in found for part in d.name.split(".") if len(part) > 2})
    pool = [exchange for d in found for exchange in exchanges(d, words, rng)]
    pool += GREETINGS * (len(pool) // (8 * len(GREETINGS)))  # about one in nine
    rng.shuffle(pool)
    texts = []
    while pool:
        messages: list[dict[str, str]] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": "You are a helpful assistant."})
        turns = [pool.pop() for _ in range(min(rng.choice((1, 1, 2, 3)), len(pool)))]
        for turn in turns[:-1]:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        last = turns[-1]
        way = rng.choice(("plain", "plain", "plain", "empty", "/think", "/no_think"))
        question = f"{last.question} {way}" if way.startswith("/") else last.question
        prompt = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": question}],
            tools=[turn.tool for turn in turns if turn.tool] or None,
            tokenize=False,
            add_generation_prompt=True,
            **({"enable_thinking": False} if way == "empty" else {}),
        )
        thoughts = {"/think": f"The user says: {last.question}\n", "/no_think": "\n"}
        thought = f"<think>\n{thoughts[way]}</think>\n\n" if way in thoughts else ""
        texts.append(f"{prompt}{thought}{last.answer}{TURN_END}\n")
    return texts


# ----------------------------------------------------------------------------------------------- token streams


@dataclass(frozen=True)
class Stream:
    """Documents one after the other, each ended by the end-of-text token."""

    tokens: Tensor  # [N] int32, on the training device
    starts: Tensor  # [D] int64, where each document begins

    def batch(self, num_rows: int, num_tokens: int, generator: torch.Generator, *, aligned: bool) -> Tensor:
        """Return random windows [num_rows, num_tokens + 1] int64; aligned ones begin where a document does."""
        last = len(self.tokens) - num_tokens - 1
        device = self.tokens.device
        if aligned:
            choice = torch.randint(len(self.starts), (num_rows,), generator=generator)
            offsets = self.starts[choice.to(device)].clamp(max=last)
        else:
            offsets = torch.randint(last, (num_rows,), generator=generator).to(device)
        window = torch.arange(num_tokens + 1, device=device)
        return self.tokens[offsets[:, None] + window].long()


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's token ids; they may be longer than the model's context."""
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts))]


def make_stream(texts: Sequence[str], tokenizer: Any, device: torch.device) -> Stream:
    """Tokenize documents into a stream."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    documents = [[*ids, end] for ids in encode(tokenizer, texts)]
    lengths = torch.tensor([0] + [len(document) for document in documents[:-1]])
    tokens = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    return Stream(tokens.to(device), lengths.cumsum(0).to(device))


# ---------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def score_bits(model: Any, token_ids: Sequence[int], end_of_text: int, context: int = MAX_POSITIONS) -> float:
    """Return how many bits the model needs to tell a text, its first token after an end of text.

    Windows slide by half a context, so every token but those of the first window is told after at least half of one.

    Args:
        model: A causal language model whose call returns logits [1, T, V].
        token_ids: The text.
        end_of_text: The token that precedes it.
        context: The window's tokens.
    """
    ids = torch.tensor([end_of_text, *token_ids], device=model.device)
    bits, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), max(scored + context // 2, context))
        begin = max(0, end - context)
        logits = model(ids[None, begin : end - 1]).logits[0, scored - 1 - begin :]
        bits += F.cross_entropy(logits.float(), ids[scored:end], reduction="sum").item() / math.log(2)
        scored = end
    return bits


def bits_per_byte(model: Any, tokenizer: Any, texts: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Return total bits over total UTF-8 bytes, and the same file by file."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = zip(texts, encode(tokenizer, list(texts.values())), strict=True)
    bits = {name: score_bits(model, token_ids, end) for name, token_ids in encoded}
    sizes = {name: len(text.encode()) for name, text in texts.items()}
    return sum(bits.values()) / sum(sizes.values()), {name: bits[name] / sizes[name] for name in texts}


def gzip_bits_per_byte(texts: dict[str, str]) -> float:
    """Return what `gzip -9` needs for the same files, each compressed by itself."""
    data = [text.encode() for text in texts.values()]
    return 8 * sum(len(gzip.compress(d, 9)) for d in data) / sum(len(d) for d in data)


# --------------------------------------------------------------------------------------------------- training


def build_model(tokenizer: Any) -> Any:
    """Return the untrained `tiny`: six layers split evenly over two and three stages, unevenly over four."""
    config = Qwen3Config(  # type: ignore[call-arg]  # rope_theta travels among the keywords
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        use_cache=False,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters <= 4_000_000, num_parameters
    return model


def build_shape(shape: str, tokenizer: Any) -> Any:
    """Return an untrained model of a published shape, float32, for a tokenizer that may know fewer tokens.

    Args:
        shape: The folder of its config.json, of Qwen3's architecture.
        tokenizer: Its ids are the first of the shape's vocabulary. No text has the others.
    """
    config: Any = transformers.AutoConfig.from_pretrained(shape)
    assert len(tokenizer) <= config.vocab_size, (len(tokenizer), config.vocab_size)
    config.bos_token_id = None
    config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN_END)
    config.pad_token_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    config.use_cache = False
    model: Any = Qwen3ForCausalLM._from_config(config, dtype=torch.float32)
    return model


def make_optimizers(model: Any, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (as torch ships it) for the layers' matrices, AdamW for embedding and norms; one learning rate for both."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = list(dict.fromkeys([model.model.embed_tokens.weight, model.lm_head.weight]))  # one if they are tied
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


def make_loss(model: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the mean cross entropy of windows [B, T + 1]; on a GPU in bf16 and compiled.

    Compiled is what repeats, a layer and the loss of a piece: all layers use the code of one, however many there are.
    Logits are made piece by piece, and made again for the gradients: of a large vocabulary they would not fit.
    """
    num_at_once = 2 ** int(math.log2(MAX_LOGITS / model.config.vocab_size))  # tokens; divides windows evenly

    def nats(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")

    def nats_in_little_memory(hidden: Tensor, targets: Tensor) -> Any:
        return checkpoint(nats, hidden, targets, use_reentrant=False)

    of_piece: Callable[[Tensor, Tensor], Tensor] = nats_in_little_memory
    if device.type == "cuda":
        of_piece = torch.compile(of_piece, dynamic=False)
        for layer in model.model.layers:
            layer.compile(dynamic=False)

    def loss(windows: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            # No mask but the causal one: a materialized mask would keep attention from its fast kernels.
            hidden = model.model(
                windows[:, :-1], attention_mask={"full_attention": None}, use_cache=False
            ).last_hidden_state
            targets = windows[:, 1:].flatten()
            pieces = zip(hidden.flatten(0, 1).split(num_at_once), targets.split(num_at_once), strict=True)
            return torch.stack([of_piece(*piece) for piece in pieces]).sum() / len(targets)

    return loss


def train(
    model: Any, code: Stream, chat: Stream, arguments: argparse.Namespace, evaluate: Callable[[], float]
) -> list[dict[str, float]]:
    """Train in place; return the loss curve.

    The last tenth of `tiny`'s steps sees windows of the full context in place of the short ones, equally many tokens a
    step: the model learns long distances when it knows the rest, for little compute. Other shapes see windows of one
    length throughout: their full context is not what they are trained for, and every length is compiled.

    With `arguments.seconds` training ends by then, compiling included, and nothing is evaluated: the caller does, after
    it. The schedule follows the steps taken or the time, whichever is further. The time's share is of what the first
    step leaves, which compiles: the learning rate then rises from zero and decays to the end either way.
    """
    device = code.tokens.device
    generator = torch.Generator().manual_seed(arguments.seed)
    loss_of = make_loss(model, device)
    optimizers = make_optimizers(model, arguments.learning_rate)
    long_from = arguments.steps - arguments.steps // 10
    long_context = arguments.context if arguments.shape else min(MAX_POSITIONS, 8 * arguments.context)
    seconds = arguments.seconds or math.inf
    curve: list[dict[str, float]] = []
    running, counted, started = torch.zeros((), device=device), 0, time.perf_counter()
    step, position, first_ended = 0, 0.0, 0.0  # position: of the schedule, in steps
    while position < arguments.steps:
        context = arguments.context if position < long_from else long_context
        num_rows = max(2, arguments.batch * arguments.context // context)
        num_chat_rows = max(1, round(num_rows * arguments.chat_share))
        windows = torch.cat(
            [
                code.batch(num_rows - num_chat_rows, context, generator, aligned=False),
                chat.batch(num_chat_rows, context, generator, aligned=True),
            ]
        )
        share = learning_rate_share(position, arguments.steps)
        for part in torch.split(windows, max(1, arguments.part_tokens // context)):
            loss = loss_of(part) * (len(part) / len(windows))
            torch.autograd.backward(loss)
            running += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, counted, taken = step + 1, counted + 1, time.perf_counter() - started
        first_ended = first_ended or taken
        position = max(step, arguments.steps * (taken - first_ended) / max(1e-3, seconds - first_ended))
        if step % arguments.evaluate_every == 0 or position >= arguments.steps:
            point = {
                "step": step,
                "tokens": step * arguments.batch * arguments.context,
                "learning_rate_share": round(share, 4),
                "training_loss": round(running.item() / counted, 4),
            }
            if not arguments.seconds:
                with torch.compiler.set_stance("force_eager"):  # every file has another length
                    point["held_out_bits_per_byte"] = round(evaluate(), 4)
            point["seconds"] = round(time.perf_counter() - started, 1)
            curve.append(point)
            print(json.dumps(point), flush=True)
            running, counted = torch.zeros((), device=device), 0
    return curve


# ------------------------------------------------------------------------------------------------- the program


def score_export(directory: Path, held_out: dict[str, str], device: torch.device) -> dict[str, Any]:
    """Score an exported model as it runs on a CPU: bf16 weights, float32 arithmetic."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(device).eval()
    total, by_file = bits_per_byte(model, tokenizer, held_out)
    result = {
        "bits_per_byte": round(total, 4),
        "gzip_9_bits_per_byte": round(gzip_bits_per_byte(held_out), 4),
        "held_out_bytes": sum(len(text.encode()) for text in held_out.values()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "by_file": {name: round(value, 4) for name, value in by_file.items()},
    }
    print(json.dumps(result, indent=1))
    return result


def make_head(arguments: argparse.Namespace, training: dict[str, str]) -> None:
    """Train a head for an exported model on a CPU, and write it with a record of how."""
    torch.manual_seed(arguments.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.head)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(arguments.head, dtype=torch.float32).eval()
    cpu, rng = torch.device("cpu"), random.Random(arguments.seed)
    code = make_stream(list(training.values()), tokenizer, cpu)
    chat = make_stream(conversations(training, tokenizer, rng), tokenizer, cpu)
    head, vocabulary, curve = train_tiny_head.train_head(model, code, chat, arguments)
    train_tiny_head.export_head(head, vocabulary, model.config, arguments.out)
    settings = {name: value for name, value in vars(arguments).items() if name.startswith("head_")}
    record = {"settings": settings, "torch": torch.__version__, "curve": curve}
    path = arguments.record or arguments.out / "training.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a standard library; default: mine")
    add("--out", type=Path, default=Path("build/tiny"), help="where the model goes")
    add("--record", type=Path, help="where settings, loss curve and result go, as JSON; default: OUT/training.json")
    add("--score", type=Path, metavar="MODEL", help="do not train; score this exported model")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shape", metavar="FOLDER", help="of a config.json: train a model of this Qwen3 shape in place of tiny")
    add("--steps", type=int, default=600, help="ten passes over the text; more of them overfit")
    add("--seconds", type=float, default=0.0, help="end training by then, whatever the steps; 0: no limit")
    add("--batch", type=int, default=128, help="windows a step")
    add("--context", type=int, default=1024, help="tokens a window; tiny's last tenth of the steps sees 4,096")
    add("--learning-rate", type=float, default=1e-2)
    add("--chat-share", type=float, default=0.05, help="share of the windows that hold conversations")
    add("--evaluate-every", type=int, default=100, metavar="STEPS", help="with --seconds: only tell the training loss")
    add("--seed", type=int, default=0)
    add("--head", type=Path, metavar="MODEL", help="train no model, but an EAGLE-3 head for this exported one")
    add("--head-steps", type=int, default=4000)
    add("--head-seconds", type=float, default=0.0, help="end by then, whatever the steps; 0: no limit")
    add("--head-batch", type=int, default=16, help="windows a step; half of them are texts that the model wrote")
    add("--head-context", type=int, default=192, help="tokens a window")
    add("--head-learning-rate", type=float, default=1e-3)
    add("--head-written", type=int, default=1600, metavar="TEXTS", help="texts that the model writes for its head")
    add("--part-tokens", type=int, help="tokens a backward pass, for memory; default: 131072 on a GPU, 8192 on a CPU")
    arguments = parser.parse_args()
    if arguments.shape and not (Path(arguments.shape) / "config.json").is_file():
        parser.error(f"--shape {arguments.shape}: there is no config.json; shapes are in benchmarks/models")
    if arguments.seconds < 0:
        parser.error(f"--seconds {arguments.seconds}: no time to train in; 0 is no limit")
    if arguments.part_tokens is None:
        arguments.part_tokens = 131_072 if arguments.device.startswith("cuda") else 8192
    return arguments


def main() -> None:
    """Train, export and score; or only score."""
    if "--vision" in sys.argv[1:]:
        import train_tiny_vl  # draws pictures, which text alone needs no library for

        train_tiny_vl.main([argument for argument in sys.argv[1:] if argument != "--vision"])
        return
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    training, held_out = split_held_out(read_sources(arguments.corpus))
    if arguments.score:
        score_export(arguments.score, held_out, device)
        return
    if arguments.head:
        make_head(arguments, training)
        return

    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    texts = list(training.values())
    rng.shuffle(texts)
    tokenizer: Any = (
        transformers.AutoTokenizer.from_pretrained(TOKENIZER_DIRECTORY) if arguments.shape else train_tokenizer(texts)
    )
    code = make_stream(texts, tokenizer, device)
    chat = make_stream(conversations(training, tokenizer, rng), tokenizer, device)
    corpus = {
        "files": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "tokens": len(code.tokens),
        "conversations": len(chat.starts),
        "conversation_tokens": len(chat.tokens),
    }
    print(json.dumps(corpus), flush=True)
    model = (build_shape(arguments.shape, tokenizer) if arguments.shape else build_model(tokenizer)).to(device)

    def evaluate() -> float:
        return bits_per_byte(model, tokenizer, held_out)[0]

    curve = train(model, code, chat, arguments, evaluate)
    export(model, tokenizer, arguments.out)
    settings = {name: value for name, value in vars(arguments).items() if isinstance(value, int | float | str)}
    record = {
        "settings": settings,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "corpus": corpus,
        "result": score_export(arguments.out, held_out, device),
        "curve": curve,
    }
    path = arguments.record or arguments.out / "training.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
