"""The comparison with transformers notices a wrong token, and what transformers itself generates passes."""

from __future__ import annotations

import pytest
from exactness import ExactComparison
from hf_models import hf_greedy, make_checkpoint
from hf_vision import FIRST_TEXT_TOKEN, hf_vision_choices, make_vision_checkpoint, picture, picture_prompt

NUM_TOKENS = 8


def test_one_wrong_token_is_noticed(tmp_path):
    path, prompt = make_checkpoint("qwen3", 0, tmp_path), [5, 6, 7]
    right, gaps = hf_greedy(path, prompt, NUM_TOKENS)
    assert min(gaps) > 1e-3
    comparison = ExactComparison()
    comparison.compare(path, [prompt], NUM_TOKENS, lambda prompts, lengths: [right])
    assert (comparison.num_tokens, comparison.num_excused) == (NUM_TOKENS, 0)
    for place in (0, 3, NUM_TOKENS - 1):
        wrong = [*right[:place], right[place] + 1, *right[place + 1 :]]
        with pytest.raises(AssertionError, match=f"token {place} is {wrong[place]}, the reference has {right[place]}"):
            comparison.compare(path, [prompt], NUM_TOKENS, lambda prompts, lengths, wrong=wrong: [wrong])


def test_choices_after_pictures_are_those_of_one_token_after_the_other(tmp_path):
    path = make_vision_checkpoint(1, tmp_path)
    prompt, items = picture_prompt(path, [[FIRST_TEXT_TOKEN], picture(1, 40, 40), [FIRST_TEXT_TOKEN + 1]])
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        choices, _ = hf_vision_choices(path, prompt, items, [*output, 0])
        assert choices[:-1] == output
        output.append(choices[-1])
    assert len(set(output)) > 1
