"""The evaluation harness: log-likelihoods of choices and generated answers. Run with the address of /v1."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[3] / "raypp" / "assets" / "tiny"
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval  # noqa: E402 it reads the variables when it is imported
from lm_eval.tasks import TaskManager  # noqa: E402

DOCUMENTS = [
    {"question": "1 + 1 =", "choices": [" 2", " 3"], "gold": 0},
    {"question": "import", "choices": [" os", " banana"], "gold": 0},
    {"question": "def f(", "choices": ["x):", "y] ="], "gold": 0},
]


def tasks(folder: str) -> list[Any]:
    """Return three tasks on the same documents: choices, whole texts, generated answers."""
    documents = Path(folder) / "documents.json"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "num_fewshot": 0,
    }
    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    match = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    return [
        {
            **common,
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold",
            "metric_list": accuracy,
        },
        {
            **common,
            "task": "texts",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        {
            **common,
            "task": "answers",
            "output_type": "generate_until",
            "doc_to_target": "{{choices[gold]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": match,
        },
    ]


def evaluate(kind: str, address: str, chosen: list[Any], **arguments: Any) -> dict[str, Any]:
    """Return the tasks' results."""
    model_args = {"model": "tiny", "base_url": address, "max_retries": 1, "max_length": 1024, **arguments}
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=model_args,
        tasks=chosen,
        apply_chat_template=kind == "local-chat-completions",
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return {name: result for name, result in results["results"].items()}


def main(base_url: str) -> None:
    completions, chats = f"{base_url}/completions", f"{base_url}/chat/completions"
    with tempfile.TemporaryDirectory() as folder:
        given = {"tokenizer_backend": "huggingface", "tokenizer": str(TOKENIZER), "num_concurrent": 2}
        seen = [
            evaluate("local-completions", completions, tasks(folder), tokenized_requests=True, **given),
            evaluate("local-completions", completions, tasks(folder), tokenized_requests=False, batch_size=2, **given),
            evaluate("local-completions", completions, tasks(folder), tokenizer_backend="remote"),
        ]
        for results in seen:
            assert results["choices"]["acc,none"] == seen[0]["choices"]["acc,none"]
            assert abs(results["texts"]["word_perplexity,none"] / seen[0]["texts"]["word_perplexity,none"] - 1) < 1e-3
        chat = evaluate("local-chat-completions", chats, tasks(folder)[2:])
        assert "exact_match,none" in chat["answers"]


if __name__ == "__main__":
    main(sys.argv[1])
