"""Which of transformers' classes reads a model's tokenizer.

`AutoTokenizer` knows for every model there is. To know, it imports much of transformers and of torch: 180 MB and a
second that a client, which computes nothing, has no use for. So the classes of the families that raypp runs are
imported by themselves; every other model is left to `AutoTokenizer`. They would still import torch, for one function
that reads GGUF files, of which `tokenizer.json` is none: it is imported when it is called.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_OWN_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""The name in tokenizer_config.json, and the name in transformers."""

_GGUF_MODULE = "transformers.modeling_gguf_pytorch_utils"  # imports torch
_READS_TOKENIZERS = "transformers.tokenization_utils_tokenizers"  # takes `load_gguf_checkpoint` from it


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
