"""A tokenizer for a model's published shape, which comes without one: as many tokens, made of random words.

Masks of grammars cost what the vocabulary's size and the lengths of its tokens make them cost; what the words mean does
not matter to that.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_END = "<|im_end|>"
_SYLLABLES = [first + second for first in "bcdfghjklmnprstvwz" for second in "aeiou"]
_PIECES = ['": "', '", "', '": ', "},", "]}", "\n\n", "  ", '{"', "0.", "();", " =>", "_id"]


def with_made_tokenizer(shape: Path, folder: Path) -> Path:
    """Write the shape's `config.json` and a tokenizer of its vocabulary's size into a folder; return that."""
    config = json.loads((shape / "config.json").read_text())
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, rng = dict.fromkeys([*byte_tokens, *(piece.replace(" ", "\u0120") for piece in _PIECES)]), random.Random(0)
    while len(tokens) < config["vocab_size"] - 1:
        word = "".join(rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4)))) + rng.choice(
            ("", "", "n", "s", "ing")
        )
        tokens.setdefault("\u0120" * rng.randrange(2) + (word.title() if rng.random() < 0.2 else word))
    # Without merges a prompt is split into bytes; what is generated may be any token.
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(folder)
    shutil.copy(shape / "config.json", folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(_END)}))
    return folder
