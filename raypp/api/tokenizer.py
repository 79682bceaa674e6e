"""Text to token ids and back, by the tokenizer that lies beside the model.

`AutoTokenizer` knows for every model there is which class of transformers reads it. To know, it imports much of
transformers and of torch: 180 MB and a second that a client, which computes nothing, has no use for. So the classes of
the families that raypp runs are imported by themselves; every other model is left to `AutoTokenizer`. They would still
import torch, for one function that reads GGUF files, of which `tokenizer.json` is none: it is imported when it is
called.

A vocabulary of Mistral's own, tekken.json, is converted by transformers, if no tokenizer.json lies beside it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from raypp.api.conversation import PLAIN_RENDERING, Rendering
from raypp.api.request_text import Detokenizer
from raypp.errors import ConfigError, ContextLengthError, ModelLoadError, RequestError
from raypp.messages import Int32s

_OWN_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""The name in tokenizer_config.json, and the name in transformers."""

_GGUF_MODULE = "transformers.modeling_gguf_pytorch_utils"  # imports torch
_READS_TOKENIZERS = "transformers.tokenization_utils_tokenizers"  # takes `load_gguf_checkpoint` from it


_TEKKEN = "tekken.json"
_OF_MISTRAL = "pip install 'raypp[mistral]'"


def load_tokenizer(model_path: str | Path) -> Any:
    """Return transformers' tokenizer of the files in a directory."""
    folder = Path(model_path)
    if (folder / _TEKKEN).is_file() and not any((folder / f"tokenizer.{end}").is_file() for end in ("json", "model")):
        from transformers.integrations.mistral import convert_tekken_tokenizer

        tokenizer = convert_tekken_tokenizer(str(folder / _TEKKEN))
        tokenizer.add_bos_token = True  # in front of each prompt, as mistral-common puts it
        return tokenizer
    chosen = tokenizer_class(model_path)
    # With mistral-common `AutoTokenizer` may take its tokenizer, which has no template and no `backend_tokenizer`.
    own = {"mistral_format": False} if chosen.__name__ == "AutoTokenizer" and find_spec("mistral_common") else {}
    return chosen.from_pretrained(str(model_path), local_files_only=True, **own)


def tokenizer_class(model_path: str | Path) -> Any:
    """Return a class whose `from_pretrained` reads the tokenizer in a directory."""
    import transformers

    name = _class_name(Path(model_path))
    if name not in _OWN_CLASSES.values():
        return getattr(transformers, name)
    with _gguf_imported_when_called():
        return getattr(transformers, name)


def _class_name(folder: Path) -> str:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # AutoTokenizer says what is wrong with it
        return "AutoTokenizer"
    named = config.get("tokenizer_class") if isinstance(config, dict) else None
    if named is None or "auto_map" in config or not (folder / "tokenizer.json").is_file():
        return "AutoTokenizer"
    return _OWN_CLASSES.get(str(named), "AutoTokenizer")


class _StandIn(ModuleType):
    """Stands for the module of GGUF files while others take names from it."""

    def load_gguf_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of this name, and import its module now."""
        return self._real().load_gguf_checkpoint(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions about a module
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        if sys.modules.get(_GGUF_MODULE) is self:
            del sys.modules[_GGUF_MODULE]
        return importlib.import_module(_GGUF_MODULE)


@contextmanager
def _gguf_imported_when_called() -> Iterator[None]:
    """Have what reads tokenizers imported without torch, unless torch is there already."""
    if "torch" in sys.modules or _GGUF_MODULE in sys.modules:
        yield
        return
    stand_in = _StandIn(_GGUF_MODULE)
    sys.modules[_GGUF_MODULE] = stand_in
    try:
        with suppress(ModuleNotFoundError):  # another version of transformers
            importlib.import_module(_READS_TOKENIZERS)
        yield
    finally:
        if sys.modules.get(_GGUF_MODULE) is stand_in:
            del sys.modules[_GGUF_MODULE]


_TEXTS_AT_ONCE = 256
"""Enough for every core. A list of integers takes nine times the memory of an array: few are held at a time."""

ChatMessage = Mapping[str, Any]
"""One message of a conversation: `role`, `content`, and whatever else the model's chat template reads."""


_PROBE_CHARS_PER_TOKEN = 16
"""More than any language's mean: a text's first `max_tokens * 16` characters tell of most that it is too long."""


_MIN_END_CHARS, _MIN_END_TOKENS = 1024, 64
"""How much more than the tokens that are kept is tokenized at least, where only the end of a text is."""

_FILES = re.compile(r"^tokenizer(?!_config)|vocab|spiece|sentencepiece|tekken|\.tiktoken$|\.model$|\.spm$")
"""Names of files that hold a vocabulary, of whatever tokenizer transformers knows."""

_BROKEN = "\ufffd"
_FALLBACK_NAME = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer of a model directory. Holds no state of requests; may be used from several threads."""

    def __init__(
        self, model_path: str | Path, max_tokens: int | None = None, *, chat_template: str | None = None
    ) -> None:
        """Load the tokenizer files in a directory.

        Args:
            model_path: The directory.
            max_tokens: As the attribute of that name.
            chat_template: In place of the model's own, in Jinja.

        Raises:
            ModelLoadError: there are none, they cannot be read, or the model's own chat template is broken.
            ConfigError: `chat_template` is broken.
        """
        if not any(_FILES.search(path.name) for path in Path(model_path).glob("*")):
            raise _no_tokenizer(model_path, "a folder without its files")  # before seconds of imports
        try:
            self._hf: Any = load_tokenizer(model_path)
        except Exception as error:  # whatever a broken file makes of it: transformers has no error class of its own
            package = f"{_OF_MISTRAL} reads old files of Mistral's; " if isinstance(error, ImportError) else ""
            raise ModelLoadError(
                "the model's tokenizer cannot be loaded",
                got=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
                expected=f"tokenizer.json and tokenizer_config.json in {model_path}",
                hint=f"{package}the setting skip_tokenizer_init=true runs a model without a tokenizer, on token ids",
            ) from error
        self.transformers_tokenizer = self._hf
        """The tokenizer of transformers behind it. It is shared: to change it changes how requests are read."""
        self._vocabulary: dict[str, int] = self._hf.get_vocab()
        if len(self._vocabulary) <= len(self._hf.added_tokens_decoder):  # transformers makes one up without files
            raise _no_tokenizer(model_path, f"{len(self._vocabulary)} tokens in all: none but added ones")
        if chat_template is not None:
            self._hf.chat_template = chat_template
        self._check_template("the model's" if chat_template is None else "the given")
        # transformers would warn in the log of a text that is longer; it is refused, and its client told.
        self._hf.model_max_length = sys.maxsize
        backend = getattr(self._hf, "backend_tokenizer", None)
        self._decode: Callable[..., Any] = (
            backend.decode if backend is not None else partial(self._hf.decode, clean_up_tokenization_spaces=False)
        )
        self._token_bytes: dict[int, bytes] = {}  # at most the vocabulary, as the next
        self._token_texts: dict[int, str] = {}
        self._is_mistrals = (Path(model_path) / _TEKKEN).is_file()
        self.model_path = str(model_path)
        self.max_tokens = max_tokens
        """Texts that have more for certain are refused before they are tokenized whole. None takes all."""
        self._max_token_chars = max(map(len, self._vocabulary), default=1)

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_kept: int | None = None
    ) -> list[Int32s]:
        """Return each text's token ids, int32 [T].

        Args:
            texts: What to encode.
            add_special_tokens: Put those around each text that the model expects there. Not for a rendered
                conversation: its template wrote them already.
            max_kept: Cut what is longer to its last so many tokens, those that were put around it among them.

        Raises:
            ContextLengthError: a text that has more than `max_tokens` for certain.
            RequestError: a text that is not valid Unicode.
        """
        for text in texts:
            _check_unicode(text)
            if self.max_tokens is not None and max_kept is None:
                self._check_length(text, self.max_tokens)
        if max_kept is not None:
            return [self._end_of(text, max_kept, add_special_tokens) for text in texts]
        encoded: list[Int32s] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            some = list(texts[start : start + _TEXTS_AT_ONCE])
            encoded += [
                np.array(ids, np.int32) for ids in self._hf(some, add_special_tokens=add_special_tokens)["input_ids"]
            ]
        return encoded

    def _end_of(self, text: str, num_tokens: int, add_special_tokens: bool) -> Int32s:
        """Return the last tokens of a text. Only its end is tokenized: the rest may be many megabytes."""
        num_chars = _PROBE_CHARS_PER_TOKEN * num_tokens + _MIN_END_CHARS
        while True:
            end = text[-num_chars:]
            token_ids: list[int] = self._hf([end], add_special_tokens=False)["input_ids"][0]
            # Cutting a text changes its tokens near the cut only, far from those that are kept.
            if len(end) == len(text) or len(token_ids) >= 2 * num_tokens + _MIN_END_TOKENS:
                break
            num_chars *= 2
        before, behind = self._special_tokens_around(end, token_ids) if add_special_tokens else ([], [])
        num_kept = max(num_tokens - len(before) - len(behind), 0)
        kept = [*before, *token_ids[max(len(token_ids) - num_kept, 0) :], *behind]
        return np.array(kept[:num_tokens], np.int32)

    def _special_tokens_around(self, text: str, token_ids: list[int]) -> tuple[list[int], list[int]]:
        whole: list[int] = self._hf([text], add_special_tokens=True)["input_ids"][0]
        num_more = len(whole) - len(token_ids)
        start = next((i for i in range(num_more + 1) if whole[i : i + len(token_ids)] == token_ids), 0)
        return whole[:start], whole[start + len(token_ids) :]

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot fit. Tokenizing takes about a second per megabyte: most of that is saved."""
        max_chars = max_tokens * self._max_token_chars  # of a token, a character stands for one of the text at most
        if len(text) > max_chars:
            raise _too_long(f"{len(text)} characters", max_tokens, f", which is {max_chars} characters at most")
        probe = text[: max_tokens * _PROBE_CHARS_PER_TOKEN]
        if len(probe) == len(text):
            return
        # Cutting a text changes its tokens near the cut only: twice too many are too many of the whole text, too.
        num_tokens = len(self._hf([probe], add_special_tokens=False)["input_ids"][0])
        if num_tokens > 2 * max_tokens:
            raise _too_long(f"{len(text)} characters, {num_tokens} tokens in the first {len(probe)}", max_tokens)

    def render_chat(self, messages: Sequence[ChatMessage], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return a conversation as the text that the model continues, up to where the assistant's message begins.

        Args:
            messages: The conversation so far.
            rendering: Further values for the template.

        Raises:
            RequestError: there is no chat template, or the template refuses the messages.
        """
        if not (rendering.chat_template or self._hf.chat_template):
            package = f"; {_OF_MISTRAL} makes one of {_TEKKEN}" if self._is_mistrals else ""
            raise RequestError(
                "the model has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                hint=f"use generate with a prompt that is formatted already, or the setting chat_template{package}",
            )
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                chat_template=rendering.chat_template,
                add_generation_prompt=rendering.add_generation_prompt,
                continue_final_message=rendering.continue_final_message,
                tokenize=False,
                **rendering.template_values(),
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise RequestError(
                "the model's chat template refuses the messages",
                got=f"{type(error).__name__}: {error}",
                expected='messages like {"role": "user", "content": "..."}',
                hint="the template lies beside the model and says which messages it takes, and in which order",
            ) from error
        return text

    def _check_template(self, whose: str) -> None:
        """Refuse a chat template that renders no question at all; one that refuses it by itself has its reasons."""
        if not self._hf.chat_template:
            return
        errors: list[Exception] = []
        for content in ("Hello", [{"type": "text", "text": "Hello"}]):
            try:
                self._hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
                return
            except Exception as error:  # a template is a program: it raises what it likes
                errors.append(error)
        if type(errors[0]) is TemplateError:
            return
        line = getattr(errors[0], "lineno", None)
        raise (ConfigError if whose == "the given" else ModelLoadError)(
            f"{whose} chat template is broken: it cannot render one message of a user",
            got=f"{type(errors[0]).__name__}: {errors[0]}" + ("" if line is None else f", line {line}"),
            expected="a template in Jinja that renders messages with role and content",
            hint="correct it, or give another one as chat_template, a file or the template itself",
        )

    @property
    def chat_template(self) -> str:
        """The model's chat template; where it has several, all of them; empty if it has none."""
        template = self._hf.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def template_reads(self, name: str) -> bool:
        """Return whether the model's chat template has a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.chat_template) is not None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, by default without special ones, spaces as they are."""
        detokenizer = Detokenizer(self, skipped=self.special_token_ids if skip_special_tokens else ())
        return detokenizer.add(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, special ones too; none for an id without a token.

        Args:
            token_id: The token.
            is_first: Whether it begins the text: a SentencePiece vocabulary drops the space of a first word.
        """
        piece = self._token_bytes.get(token_id)
        if piece is None:
            piece = self._token_bytes[token_id] = self._bytes_behind_itself(token_id)
        if is_first and _BROKEN not in (alone := self._decoded(token_id)):
            return alone.encode()
        return piece

    def _bytes_behind_itself(self, token_id: int) -> bytes:
        """Return what decoding a token twice adds to decoding it once, or the bytes that its name stands for."""
        twice = self._decoded(token_id, token_id)
        if _BROKEN in twice:  # a part of a character
            [name] = self.token_texts([token_id])
            if of_fallback := _FALLBACK_NAME.fullmatch(name):
                return bytes.fromhex(of_fallback[1])
            if _byte_characters().keys() >= set(name):
                return bytes(_byte_characters()[char] for char in name)
        return twice[len(self._decoded(token_id)) :].encode()

    def _decoded(self, *token_ids: int) -> str:
        text: str = self._decode(token_ids, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of a token behind others, special ones too; a part of a character is U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.token_bytes(token_id).decode(errors="replace")
        return text

    def token_id(self, text: str) -> int | None:
        """Return the token that a text is, if it is one of its own."""
        return self._vocabulary.get(text)

    def has_tokens(self, *texts: str) -> bool:
        """Return whether each of these texts is a token of its own."""
        return all(text in self._vocabulary for text in texts)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary has it; ids that it does not know are empty."""
        names: list[str | None] = self._hf.convert_ids_to_tokens(list(token_ids))
        return [name or "" for name in names]

    def description(self) -> dict[str, Any]:
        """Return what the tokenizer is, in plain values, by the names of transformers."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        added = sorted(self._hf.added_tokens_decoder.items())
        template = self._hf.chat_template or None
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": self.vocab_size,
            "chat_template": template.get("default") if isinstance(template, dict) else template,  # by name, in some
            **{name: getattr(self._hf, name) for name in names},
            "added_tokens_decoder": {str(i): {"content": t.content, "special": t.special} for i, t in added},
        }

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `decode` leaves out."""
        added = self._hf.added_tokens_decoder
        return frozenset(self._hf.all_special_ids) | {index for index, token in added.items() if token.special}

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token that ends a text, as far as the tokenizer knows; the model may name more."""
        return frozenset() if self._hf.eos_token_id is None else frozenset({self._hf.eos_token_id})

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may be larger: it is often padded."""
        return len(self._hf)


@cache
def _byte_characters() -> dict[str, int]:
    """Return the characters that a byte-level vocabulary writes bytes as: themselves, or one above 255, in order."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    others = sorted(set(range(256)).difference(map(ord, alphabet)))
    return dict(zip(alphabet, [*(ord(char) for char in alphabet if ord(char) < 256), *others], strict=True))


def _no_tokenizer(model_path: str | Path, got: str) -> ModelLoadError:
    return ModelLoadError(
        "the model has no tokenizer",
        got=got,
        expected=f"tokenizer.json, or other files of a tokenizer, in {model_path}",
        hint="copy them from the origin of the model; the setting skip_tokenizer_init=true runs it on token ids alone",
    )


def _too_long(got: str, max_tokens: int, more: str = "") -> ContextLengthError:
    return context_length_error(
        "a text is longer",
        max_tokens,
        got=got,
        expected=f"at most max_model_len = {max_tokens} tokens{more}",
        hint="shorten the text or raise max_model_len",
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "a prompt is not valid Unicode",
            got=ascii(text)[:80],
            expected="text without lone surrogates",
            hint='text.encode(errors="replace").decode() leaves them out',
        ) from error


def check_context_length(
    num_tokens: int, max_model_len: int, *, request_id: str | None = None, param: str | None = None
) -> None:
    """Accept a prompt that leaves room for one output token.

    Args:
        num_tokens: Of the prompt.
        max_model_len: The most tokens of a request, prompt and output together.
        request_id: Whose prompt it is.
        param: The field of the request's body that holds the prompt.

    Raises:
        ContextLengthError: it leaves none.
    """
    if num_tokens < max_model_len:
        return
    raise context_length_error(
        "the prompt leaves no room for a single output token",
        max_model_len,
        got=f"{num_tokens} tokens",
        expected=f"at most max_model_len - 1 = {max_model_len - 1}",
        hint="shorten the prompt or raise max_model_len",
        request_id=request_id,
        param=param,
    )


def context_length_error(
    what: str,
    max_model_len: int,
    *,
    got: str,
    expected: str,
    hint: str,
    request_id: str | None = None,
    param: str | None = None,
) -> ContextLengthError:
    """Return the error. Clients look for its first words, and then shorten the conversation or take another model.

    Args:
        what: What is wrong.
        max_model_len: The most tokens of a request, prompt and output together.
        got: How long it is.
        expected: How long it may be.
        hint: What to do.
        request_id: Whose request it is.
        param: The field of the request's body at fault.
    """
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens: {what}",
        got=got,
        expected=expected,
        hint=hint,
        request_id=request_id,
        param=param,
    )
