"""What `tiny` and `tiny-vl` are trained with alike: the tokenizer, the schedule of the learning rate, the export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

TOKENIZER_DIRECTORY = Path(__file__).parents[2] / "raypp" / "assets" / "tiny"
MAX_POSITIONS = 4096
VOCAB_SIZE = 4032  # 63 * 64: with 4096 six layers would not fit into four million parameters
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
# Marks that a reader of the text wants to see, so decoding keeps them: no special tokens in the library's sense.
VISIBLE_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Qwen's way to cut text before byte pairs are merged: contractions, words with one leading mark, single digits,
# runs of punctuation, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """Learn a byte-level BPE. No normalizer: every text comes back exactly as it went in."""
    added = [AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, TURN_START, TURN_END, *VISION_TOKENS)]
    added += [AddedToken(t, special=False, normalized=False) for t in VISIBLE_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (TOKENIZER_DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def learning_rate_share(step: float, num_steps: int) -> float:
    """Return the share of the peak learning rate: a short linear rise, then a cosine down to 2 %."""
    warmup = min(100, max(1, num_steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.49 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def export(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the checkpoint as Hugging Face lays it out: bf16 weights, configuration, tokenizer, chat template."""
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, END_OF_TEXT)]
    model.config.use_cache = True
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=ends[1]
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
