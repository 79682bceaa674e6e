"""What the published library reads in texts of gpt-oss's channels: written to channel_texts.json, read by tests.

    pip install openai-harmony==0.0.8
    TIKTOKEN_ENCODINGS_BASE=FOLDER python tests/unit/openai_api/channel_texts.py

FOLDER has `o200k_base.tiktoken`, which the library downloads otherwise, and checks by its hash.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
START = "<|start|>assistant"
_NUM_TEXTS = 120
_PIECES = [
    "a",
    " ",
    "\n",
    "so",
    "{",
    "}",
    '"',
    "<|",
    "|>",
    "<",
    "final",
    "analysis",
    " to=functions.x",
    "\u00fc\U0001f327",
]
_VALUES = [1, -2.5, True, None, "", 'a"b\\', "x\ny", {"k": [1, {}]}, [], "<|", "}{"]


def _arguments(rng: random.Random) -> str:
    values = {rng.choice("abc"): rng.choice(_VALUES) for _ in range(rng.randint(0, 3))}
    return json.dumps(values, ensure_ascii=rng.random() < 0.5)


def _message(rng: random.Random) -> tuple[str, str]:
    """Return a message behind `<|start|>assistant`, and what ends it."""
    kind = rng.random()
    if kind < 0.1:
        header = f"<|channel|>{rng.choice(['commentary', 'final'])} <|constrain|>json"
        return f"{header}<|message|>{_arguments(rng)}", rng.choice(["<|end|>", "<|return|>"])
    if kind < 0.5:
        text = "".join(rng.choices(_PIECES, k=rng.randint(0, 6)))
        return f"<|channel|>{rng.choice(['analysis', 'commentary', 'final'])}<|message|>{text}", "<|end|>"
    to, channel = f" to=functions.{rng.choice(['f', 'get.it-2', 'a_b'])}", rng.choice(["analysis", "commentary"])
    form = rng.choice(["<|constrain|>json", " <|constrain|>json", " json", " code", ""])
    header = rng.choice([f"{to}<|channel|>{channel}", f"<|channel|>{channel}{to}"])
    return f"{header}{form}<|message|>{_arguments(rng)}", "<|call|>"


def _texts() -> list[str]:
    rng, texts = random.Random(0), []
    for _ in range(_NUM_TEXTS):
        messages = ["".join(_message(rng)) for _ in range(rng.randint(0, 3))]
        last, end = _message(rng)
        texts.append(START.join([*messages, last + rng.choice([end, ""])]))
    return texts


def main() -> None:
    import openai_harmony as harmony  # type: ignore[import-not-found]

    encoding, cases = harmony.load_harmony_encoding("HarmonyGptOss"), []
    for text in _texts():
        parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
        for token_id in encoding.encode(text, allowed_special="all"):
            parser.process(token_id)
        parser.process_eos()
        found = [[m.channel, m.recipient or "", "".join(part.text for part in m.content)] for m in parser.messages]
        cases.append({"text": text, "messages": found})
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()
