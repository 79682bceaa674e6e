"""Tokens, their bytes and their places in a text, of byte-level vocabularies and of SentencePiece's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import KINDS, SENTENCEPIECE, WORDS, make_tokenizer

from raypp.api.request_text import Detokenizer, RequestText, TokenPlaces, prompt_places
from raypp.api.running_request import LogprobLists, PreparedRequest, RunningRequest
from raypp.api.tokenizer import Tokenizer
from raypp.openai_api.from_outputs import PreparedCompletion, ResponseHead, TokenNames
from raypp.request import Request
from raypp.types import FinishReason, Logprob, SamplingParams


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: make_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


_SCRIPTS = "abc .,\n\u00df\u00e9\u0301\u043c\u0438\u0440\u4e16\u754c\u3042\ud55c\u0646\u0939\u093f"
_SCRIPTS += "\U0001f336\U0001f468\u200d\ufffd"
texts = st.lists(st.text(_SCRIPTS, max_size=6) | st.text(max_size=4) | st.sampled_from(WORDS), max_size=8).map(" ".join)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that is within a longer one: none is put in front of it."""
    [token_ids] = tokenizer.encode([text.replace("\u2581", " ")], add_special_tokens=False)
    token_list: list[int] = token_ids.tolist()
    return token_list


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), prompt=texts, text=texts)
def test_bytes_pieces_and_places_are_those_of_the_joined_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, prompt: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    whole = [0, *tokens_of(tokenizer, f"{prompt} {text}")]
    num_prompt = data.draw(st.integers(1, len(whole)))
    before, token_ids = whole[:num_prompt], whole[num_prompt:]
    expected = tokenizer.transformers_tokenizer.backend_tokenizer.decode(whole, skip_special_tokens=True)
    assert tokenizer.decode(whole) == expected

    begun, continued = (Detokenizer(tokenizer, skipped={0}, prompt=tokens) for tokens in ((), before))
    pieces = [begun.piece(token_id) for token_id in before] + [continued.piece(token_id) for token_id in token_ids]
    assert b"".join(pieces) == expected.encode()
    as_told = b"".join(map(tokenizer.token_bytes, whole[1:]))
    assert as_told == expected.encode() or as_told == f" {expected}".encode()

    streaming = Detokenizer(tokenizer, skipped={0})
    assert "".join(streaming.add([token_id]) for token_id in whole) + streaming.finish() == expected

    places, starts = TokenPlaces(), [0]
    for piece in pieces:
        starts.append(starts[-1] + len(piece))
    character_of_byte = [place for place, char in enumerate(expected) for _ in char.encode()] + [len(expected)]
    found = [places.add(piece) for piece in pieces]
    assert found == [character_of_byte[start] for start in starts[:-1]]
    if not expected.startswith(" "):  # else the first of several tokens may be the space that the tokenizer put there
        assert prompt_places(tokenizer, expected, whole) == found


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.binary(max_size=3) | st.sampled_from([b"\xf0\x9f", b"\x8c\xb6", b"\xe4", b"a"]), max_size=12))
def test_places_count_broken_characters_as_the_text_has_them(pieces: list[bytes]) -> None:
    """A piece begins where the text before it ends, or inside of the character that this leaves open."""
    places, joined, start = TokenPlaces(), b"".join(pieces), 0
    for piece in filter(None, pieces):
        before, rest = joined[:start].decode(errors="replace"), joined[start:].decode(errors="replace")
        is_inside = before + rest != joined.decode(errors="replace")
        assert places.add(piece) == len(before) - is_inside
        start += len(piece)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_decode_as_they_do_elsewhere(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    backend = tokenizer.transformers_tokenizer.backend_tokenizer
    for token_id in range(tokenizer.vocab_size + 2):  # two that are no tokens
        for token_ids in ([token_id], [3 + 0x41, token_id], [token_id, token_id, 0, 3 + 0x41]):
            decoded = backend.decode(token_ids, skip_special_tokens=False)
            if "\ufffd" not in decoded:
                assert tokenizer.decode(token_ids, skip_special_tokens=False) == decoded


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_has_a_token(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    written = {tokenizer.token_bytes(token_id) for token_id in range(3, 3 + 256)}
    assert written == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_has_the_space_of_its_first_word(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    prompt = [0, *tokens_of(tokenizer, "The capital of France is")]
    paris = tokenizer.token_id("\u0120Paris" if kind == "byte-level" else "\u2581Paris")
    assert paris is not None
    assert tokenizer.token_text(paris) == " Paris"
    text = RequestText(Detokenizer(tokenizer, skipped={0}, prompt=prompt), [" Paris"])
    assert text.add([paris]) == " Paris"
    assert text.visible == ""


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_a_text_that_nothing_precedes_begins_without_a_space(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    the = tokenizer.token_id("\u2581The")
    assert the is not None
    begun = Detokenizer(tokenizer, skipped={0}, prompt=[0]).add([the, the])
    assert begun == (" The The" if kind == "no-prefix" else "The The")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_a_place_where_a_prompt_spells_them(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    prompt = "The<|mark|> mir<|mark|>"
    token_ids = [0, *tokens_of(tokenizer, prompt)]
    places = prompt_places(tokenizer, prompt, token_ids)
    mark = tokenizer.token_id("<|mark|>")
    assert [place for token_id, place in zip(token_ids, places, strict=True) if token_id == mark] == [3, 15]
    assert places[0] == 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_continues_its_prompt(tokenizers: dict[str, Tokenizer], kind: str, streams: bool) -> None:
    tokenizer = tokenizers[kind]
    prompt = [0, *tokens_of(tokenizer, "The capital of France")]
    tokens = [*tokens_of(tokenizer, "The capital of France is \U0001f336 Paris")[len(prompt) - 1 :], 1]
    params = SamplingParams(logprobs=1)
    request = PreparedRequest(Request("r", np.array(prompt, np.int32), params, seed=0), tokenizer.decode(prompt))
    running = RunningRequest(request, [1], tokenizer, stream=streams, on_change=lambda _: None)
    for token_id in tokens:
        reason = FinishReason.STOP if token_id == 1 else 0
        running.completions[0].update([token_id], reason, -1, LogprobLists([[token_id]], [[-1.0]], [1]))
    output = running.output()
    assert output.outputs[0].text == " is \U0001f336 Paris"

    output.prompt_logprobs = [None, *({token_id: Logprob(-1.0, 1, "")} for token_id in prompt[1:])]
    head = ResponseHead("cmpl-1", 1, "m")
    for echo in (False, True):
        prepared = PreparedCompletion([], params, TokenNames(tokenizer), echo=echo)
        choice = prepared.response(head, [output]).choices[0]
        told = choice.logprobs
        assert told is not None
        assert choice.text == "The capital of France" * echo + " is \U0001f336 Paris"
        num_echoed = len(prompt) * echo
        assert told.text_offset[-1] == len(choice.text)
        found = list(zip(told.tokens, told.text_offset, strict=True))[num_echoed:-1]
        assert all(token == "\ufffd" or choice.text[at:].startswith(token) for token, at in found)
        assert {at for token, at in found if token == "\ufffd"} == {choice.text.index("\U0001f336")}
        assert [" Paris" in (top or ()) for top in told.top_logprobs or ()][-2:] == [True, False]
        assert not echo or told.tokens[0] == "<s>"
