"""Mistral's own vocabulary, tekken.json: read where no tokenizer.json lies beside it."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from raypp.api.tokenizer import Tokenizer, load_tokenizer
from raypp.errors import ModelLoadError, RequestError
from raypp.grammar.vocabulary import VocabularySource

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>")
NUM_SPECIAL = 8  # one of them without a name
MERGED = (b"th", b"the", b" the", b"an", b"\xc3\xbc", b"12")
TEXTS = ["the than", "Gr\u00fc\u00dfe, \u4e16\u754c", " 1212\n\n", ""]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
TINY = Path(__file__).parents[3] / "raypp" / "assets" / "tiny"


def write_tekken(path: Path, **changed: Any) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + list(MERGED) + [b"never read"]
    names = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    values = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": NUM_SPECIAL + 256 + len(MERGED),
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": names,
        **changed,
    }
    (path / "tekken.json").write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


def test_texts_and_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tekken(tmp_path))
    assert tokenizer.vocab_size == NUM_SPECIAL + 256 + len(MERGED)
    assert (tokenizer.token_id("[INST]"), tokenizer.eos_token_ids) == (3, {2})
    plain = tokenizer.encode(TEXTS, add_special_tokens=False)
    assert [tokenizer.decode(ids.tolist()) for ids in plain] == TEXTS
    first = NUM_SPECIAL + 256
    assert plain[0].tolist() == [first + 1, NUM_SPECIAL + ord(" "), first, first + 3]
    assert [ids.tolist() for ids in tokenizer.encode(TEXTS)] == [[1, *ids.tolist()] for ids in plain]
    assert tokenizer.token_bytes(first + 4) == "\u00fc".encode()
    of_grammars = VocabularySource(str(tmp_path), tokenizer.vocab_size, (2,)).load()
    assert of_grammars.tokenizer.decode_bytes(plain[0].tolist()) == TEXTS[0].encode()


def test_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the"}]
    with pytest.raises(RequestError, match=r"no chat template.*chat_template; pip install .* makes one of tek"):
        Tokenizer(write_tekken(tmp_path)).render_chat(messages)
    given = Tokenizer(tmp_path, chat_template=TEMPLATE)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for tokenizer in (given, Tokenizer(tmp_path)):
        text = tokenizer.render_chat(messages)
        assert text == "<s>[INST]the[/INST]"
        assert tokenizer.encode([text], add_special_tokens=False)[0].tolist() == [1, 3, NUM_SPECIAL + 257, 4]


def test_old_files_without_mistral_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not name their special tokens: mistral-common knows them."""
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(ModelLoadError, match=r"mistral-common.*pip install 'raypp\[mistral\]'.*skip_tokenizer_init"):
        Tokenizer(write_tekken(tmp_path, special_tokens=None))


def test_a_tokenizer_json_beside_it_is_read(tmp_path: Path) -> None:
    for file in TINY.glob("tokenizer*.json"):
        shutil.copy(file, write_tekken(tmp_path))
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(TINY).get_vocab()
