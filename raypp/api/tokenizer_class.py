"""Which of transformers' classes reads a model's tokenizer.

`AutoTokenizer` knows for every model there is. To know, it imports much of transformers and of torch: 180 MB and a
second that a client, which computes nothing, has no use for. So the classes of the families that raypp runs are
imported by themselves; every other model is left to `AutoTokenizer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_OWN_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""The name in tokenizer_config.json, and the name in transformers."""


def tokenizer_class(model_path: str | Path) -> Any:
    """Return a class whose `from_pretrained` reads the tokenizer in a directory."""
    import transformers

    return getattr(transformers, _class_name(Path(model_path)))


def _class_name(folder: Path) -> str:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # AutoTokenizer says what is wrong with it
        return "AutoTokenizer"
    named = config.get("tokenizer_class") if isinstance(config, dict) else None
    if named is None or "auto_map" in config or not (folder / "tokenizer.json").is_file():
        return "AutoTokenizer"
    return _OWN_CLASSES.get(str(named), "AutoTokenizer")
