"""Detokenizing and stop strings: the text that streams is the text that all tokens together have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypp.api.request_text import Detokenizer, RequestText, StopChecker
from raypp.api.tokenizer import Tokenizer

SPECIAL = b"<|end|>"


class ByteDecoder:
    """Tokens are bytes, the worst case of a byte-level vocabulary; 256 is special."""

    special_token_ids = frozenset({256})

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        return SPECIAL if token_id == 256 else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def detokenizer_of_bytes(*, skip: bool = True) -> Detokenizer:
    return Detokenizer(ByteDecoder(), skipped={256} if skip else ())


def in_pieces(items: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in [*sizes, len(items)]:
        pieces.append(items[start : start + size])
        start += size
    return [piece for piece in pieces if piece]


pieces_sizes = st.lists(st.integers(1, 7), max_size=30)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), sizes=pieces_sizes)
def test_streamed_text_is_the_text_and_never_holds_a_broken_character(text: str, sizes: list[int]) -> None:
    detokenizer = detokenizer_of_bytes()
    out = ""
    for piece in in_pieces(list(text.encode(errors="ignore")), sizes):
        out += detokenizer.add(piece)
        assert text.startswith(out)
    assert out + detokenizer.finish() == text


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 256) | st.integers(0x80, 0xFF), max_size=80), sizes=pieces_sizes, skip=st.booleans()
)
def test_any_bytes_stream_to_what_they_decode_to(tokens: list[int], sizes: list[int], skip: bool) -> None:
    detokenizer = detokenizer_of_bytes(skip=skip)
    out = "".join(detokenizer.add(piece) for piece in in_pieces(tokens, sizes)) + detokenizer.finish()
    special = b"" if skip else SPECIAL
    assert out == b"".join(special if t == 256 else bytes([t]) for t in tokens).decode(errors="replace")


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    detokenizer = detokenizer_of_bytes()
    assert [detokenizer.add([0xFF]) for _ in range(500)] == ["\ufffd"] * 500


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=pieces_sizes, skip=st.booleans())
def test_real_tokenizer_streams_what_it_decodes(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 20), max_size=60))
    detokenizer = Detokenizer(tokenizer, skipped=tokenizer.special_token_ids if skip else ())
    out = "".join(detokenizer.add(piece) for piece in in_pieces(tokens, sizes)) + detokenizer.finish()
    assert out == tokenizer.decode(tokens, skip_special_tokens=skip) == decoded_by_tokenizers(tokenizer, tokens, skip)


def decoded_by_tokenizers(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> str:
    text: str = tokenizer.transformers_tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=skip)
    return text


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer like Llama 2's: what is no token of its own is written as bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "a": 1, "\u2581b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = tmp_path_factory.mktemp("byte-fallback")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(path)
    return Tokenizer(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=pieces_sizes, skip=st.booleans())
def test_bytes_of_a_fallback_stream_to_what_they_decode_to(
    byte_fallback: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    """An invalid byte is U+FFFD, and leaves the characters around it, which `tokenizers` would lose with it."""
    characters = st.sampled_from("\u4e16\U0001f389\u00fc").map(lambda char: [3 + byte for byte in char.encode()])
    parts = st.lists(characters | st.integers(0, 258).map(lambda token_id: [token_id]), max_size=12)
    tokens = [token_id for part in data.draw(parts) for token_id in part]
    detokenizer = Detokenizer(byte_fallback, skipped={0} if skip else ())
    out = "".join(detokenizer.add(piece) for piece in in_pieces(tokens, sizes)) + detokenizer.finish()
    written = [b"" if skip else b"<s>", b"a", b" b", *(bytes([byte]) for byte in range(256))]
    assert out == byte_fallback.decode(tokens, skip_special_tokens=skip)
    assert out == b"".join(written[token_id] for token_id in tokens).decode(errors="replace")
    if "\ufffd" not in out:
        assert out == decoded_by_tokenizers(byte_fallback, tokens, skip)


def test_a_character_of_a_byte_fallback_is_out_with_its_last_byte(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback)
    assert [detokenizer.add([token_id]) for token_id in (1, *(3 + b for b in b"\xe4\xb8\x96"), 2)] == [
        *("a", "", "", "\u4e16", " b")
    ]


def first_stop(text: str, stops: list[str], *, first: int = 0, include: bool = False) -> tuple[str, str | None]:
    """The definition: go on character by character, and look, once the first `first` ones are there."""
    for end in range(first + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    sizes=pieces_sizes,
    include=st.booleans(),
    num_early_pieces=st.just(0) | st.integers(0, 9),
)
def test_stop_strings_cut_alike_in_any_pieces(
    text: str, stops: list[str], sizes: list[int], include: bool, num_early_pieces: int
) -> None:
    pieces = in_pieces(list(text.encode()), sizes)
    num_early = sum(map(len, pieces[:num_early_pieces]))
    expected_text, expected_stop = first_stop(text, stops, first=num_early, include=include)
    request_text = RequestText(detokenizer_of_bytes(), stops, include_stop=include)
    found = None
    for index, piece in enumerate(pieces):
        found = request_text.add(piece, may_stop=index >= num_early_pieces)
        assert expected_text.startswith(request_text.visible)  # what was shown is never taken back
        if found:
            break
    else:
        found = request_text.finish(may_stop=len(pieces) > num_early_pieces)
    assert (request_text.visible, found) == (expected_text, expected_stop)


@pytest.mark.parametrize(
    ("text", "visible"),
    [("hello", "hello"), ("hello ST", "hello "), ("hello STO", "hello "), ("hello STx", "hello STx")],
)
def test_a_beginning_of_a_stop_string_is_held_back(text: str, visible: str) -> None:
    checker = StopChecker(["STOP"])
    assert text[: checker.num_safe(text)] == visible


@pytest.mark.parametrize("stop", ["\u4e16", "\u4e16\u754c", "! \U0001f389", "\U0001f389", "e\u0301"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_inside_of_characters_that_come_byte_by_byte(stop: str, include: bool) -> None:
    text = "Gr\u00fc\u00dfe, \u4e16\u754c! \U0001f389e\u0301\U0001f389 and more"
    request_text = RequestText(detokenizer_of_bytes(), [stop], include_stop=include)
    shown = []
    for byte in text.encode():
        found = request_text.add([byte])
        shown.append(request_text.visible)
        if found:
            break
    before = text[: text.index(stop)]
    assert request_text.visible == (before + stop if include else before)
    assert all(request_text.visible.startswith(part) for part in shown)


def test_a_stop_string_inside_of_a_token_cuts_the_token() -> None:
    request_text = RequestText(detokenizer_of_bytes(), ["b"])
    assert request_text.add(list(b"aabcc")) == "b"
    assert request_text.visible == "aa"


def test_special_tokens_may_hold_a_stop_string() -> None:
    request_text = RequestText(detokenizer_of_bytes(skip=False), ["|end"])
    assert request_text.add([*b"a", 256, *b"b"]) == "|end"
    assert request_text.visible == "a<"
    silent = RequestText(detokenizer_of_bytes(), ["|end"])
    assert silent.add([*b"a", 256, *b"b"]) is None
    assert silent.visible == "ab"
