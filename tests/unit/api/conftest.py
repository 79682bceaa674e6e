"""A small tokenizer on disk, and engines that speak with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from raypp.api.tokenizer import Tokenizer
from raypp.request import Request

_TEXT = ["def main(argv):\n    return print(argv)\n", "Grüße, 世界! 🎉🎉\n", "import os\nimport sys\n"] * 20
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<quiet>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer like Qwen's: 3 special tokens, 2 is EOS, 300 tokens in all."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHAT_TEMPLATE
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.fixture
def make_engine(model_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Makes engines that are closed when the test ends. Without a script they repeat the prompt."""
    engines = []

    def make(script: Callable[[Request], list[int]] | None = None, **options: object) -> FakeEngine:
        engine = FakeEngine(script or repeat_prompt, **{"model_path": str(model_path), **options})  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if engine.num_closed == 0 and hasattr(engine, "client_address"):
            engine.close()


def repeat_prompt(request: Request) -> list[int]:
    return request.prompt_token_ids.tolist() * (1 + request.params.max_tokens // len(request.prompt_token_ids))
