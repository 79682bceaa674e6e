"""The class that reads a tokenizer is the one that transformers.AutoTokenizer would take, without what that imports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from raypp.api.tokenizer import tokenizer_class

TINY = Path(__file__).parents[3] / "raypp" / "assets" / "tiny"
TEXTS = [
    "def main(argv):\n\treturn 1",
    "  Gr\u00fc\u00dfe, \u4e16\u754c \U0001f389",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "name", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"]
)
def test_same_tokens_as_the_auto_class(name: str, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(TINY / file, tmp_path)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": name}))
    assert tokenizer_class(tmp_path) is not transformers.AutoTokenizer
    own, auto = (cls.from_pretrained(str(tmp_path)) for cls in (tokenizer_class(tmp_path), transformers.AutoTokenizer))
    assert type(own) is type(auto)
    assert own(TEXTS)["input_ids"] == auto(TEXTS)["input_ids"]
    rendered = [t.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False) for t in (own, auto)]
    assert rendered[0] == rendered[1]
    assert own.all_special_ids == auto.all_special_ids


@pytest.mark.parametrize("config", ['{"tokenizer_class": "BertTokenizer"}', '{"auto_map": {}}', "{", "[]", None])
def test_other_models_are_left_to_the_auto_class(config: str | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    assert tokenizer_class(tmp_path) is transformers.AutoTokenizer


def test_a_client_does_not_import_what_it_has_no_use_for() -> None:
    script = f"""if True:
        import sys
        from raypp.api.tokenizer import Tokenizer
        tokenizer = Tokenizer({str(TINY)!r})
        assert tokenizer.render_chat({TALK!r})
        print([name for name in ("torch", "triton", "sympy") if name in sys.modules])
        # What it has not imported, its user still can have of it.
        from transformers import modeling_gguf_pytorch_utils, tokenization_utils_tokenizers
        assert modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES
        try:
            tokenization_utils_tokenizers.load_gguf_checkpoint("nowhere.gguf")
        except (ImportError, OSError) as error:
            assert "GGUF" in str(error) or "nowhere" in str(error), error
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
