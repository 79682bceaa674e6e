"""Whatever can be wrong with a request is found before it is sent, and said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from raypp.api.conversation import Rendering
from raypp.api.prepare import RequestPreparer
from raypp.api.tokenizer import Tokenizer
from raypp.errors import ContextLengthError, ModelLoadError, RequestError
from raypp.models.registry import resolve_model_path
from raypp.types import SamplingParams


@pytest.fixture
def preparer(tokenizer: Tokenizer) -> RequestPreparer:
    return RequestPreparer(tokenizer, vocab_size=600, max_model_len=64, seed=7)


def test_text_and_token_ids_in_order(preparer: RequestPreparer, tokenizer: Tokenizer) -> None:
    params = [SamplingParams(seed=1), SamplingParams(), SamplingParams()]
    prompts = ["import os", {"prompt_token_ids": np.array([5, 6])}, (599,)]
    prepared = preparer.prompts(prompts, params)  # type: ignore[arg-type]
    assert [p.text for p in prepared] == ["import os", None, None]
    assert tokenizer.decode(prepared[0].request.prompt_token_ids.tolist()) == "import os"
    assert [p.request.prompt_token_ids.tolist() for p in prepared[1:]] == [[5, 6], [599]]
    assert {p.request.prompt_token_ids.dtype for p in prepared} == {np.dtype(np.int32)}
    assert prepared[0].request.seed == 1
    assert prepared[1].request.seed != prepared[2].request.seed
    assert len({p.request.request_id for p in prepared}) == 3


def test_the_forms_of_a_prompt(preparer: RequestPreparer) -> None:
    text, salted, ids = preparer.prompts(["os", {"prompt": "os", "cache_salt": "me"}, [5, 6]])
    assert text.request.prompt_token_ids.tolist() == salted.request.prompt_token_ids.tolist()
    assert (text.text, salted.text, text.request.cache_salt, salted.request.cache_salt) == ("os", "os", "", "me")
    [same] = preparer.prompts([{"prompt_token_ids": [5, 6], "cache_salt": "me"}])
    assert ids.request.prompt_token_ids.tolist() == same.request.prompt_token_ids.tolist() == [5, 6]
    assert same.request.cache_salt == "me"


def test_drawn_seeds_follow_the_engines_seed(tokenizer: Tokenizer) -> None:
    def seeds(seed: int) -> list[int]:
        preparer = RequestPreparer(tokenizer, vocab_size=600, max_model_len=20, seed=seed)
        return [p.request.seed for p in preparer.prompts(["a", "b"])]

    assert seeds(1) == seeds(1) != seeds(2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "no tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [1] * 64}, "no room"),
        ({"prompt_token_ids": [1, 600]}, "600 at position 1"),
        ({"prompt_token_ids": [-1]}, "-1 at position 0"),
        ({"prompt_token_ids": [2**70]}, "not token ids"),
        ({"prompt_token_ids": [1.0]}, "not token ids"),
        ({"prompt_token_ids": [[1]]}, "not token ids"),
        ({"prompt_token_ids": [[1], [2, 3]]}, "not token ids"),
        ({"prompt_token_ids": "abc"}, "not token ids"),
        ({"prompt_token_ids": None}, "not token ids"),
        ({"prompt": [1]}, "wrong keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "wrong keys"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt of a prompt is no name"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt of a prompt is no name"),
        ([1, 600], "600 at position 1"),
        (["a", 1], "not token ids"),
        ({}, "wrong keys"),
        (5, "prompt_token_ids"),
        (b"abc", "wrong type"),
        ("a\ud800", "not valid Unicode"),
    ],
)
def test_bad_prompts(preparer: RequestPreparer, prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        preparer.prompts(["fine", prompt])  # type: ignore[list-item]
    assert caught.value.got is not None
    assert caught.value.expected is not None


def test_the_longest_prompt_that_fits(preparer: RequestPreparer) -> None:
    assert len(preparer.prompts([{"prompt_token_ids": [1] * 63}])[0].request.prompt_token_ids) == 63


def test_a_token_that_the_model_has_not(tokenizer: Tokenizer) -> None:
    preparer = RequestPreparer(tokenizer, vocab_size=10, max_model_len=20, seed=0)
    with pytest.raises(RequestError, match="no embedding"):
        preparer.prompts(["import"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "1 for 2 prompts"),
        ({"max_tokens": 3}, "wrong type"),
        ([SamplingParams(), None], "wrong type"),
        (SamplingParams(stop_token_ids=[600]), "stop_token_ids"),
    ],
)
def test_bad_params(preparer: RequestPreparer, params: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        preparer.prompts(["a", "b"], params)  # type: ignore[arg-type]


@pytest.mark.parametrize("request_ids", [["x"], ["x", "x"], ["x", ""], ["x", 3]])
def test_bad_request_ids(preparer: RequestPreparer, request_ids: list[str]) -> None:
    with pytest.raises(RequestError):
        preparer.prompts(["a", "b"], None, request_ids)


def test_chat_renders_the_template_once(preparer: RequestPreparer, tokenizer: Tokenizer) -> None:
    [prepared] = preparer.chats(
        [[{"role": "user", "content": "os"}]], rendering=Rendering(chat_template_kwargs={"quiet": True})
    )
    assert prepared.text == "<|im_start|>user\nos<|im_end|>\n<|im_start|>assistant\n<quiet>"
    assert prepared.request.prompt_token_ids.tolist().count(1) == 2
    assert prepared.request.prompt_token_ids.tolist().count(2) == 1


def test_the_last_message_may_be_continued(preparer: RequestPreparer) -> None:
    conversation = [{"role": "user", "content": "os"}, {"role": "assistant", "content": "impo"}]
    [none] = preparer.chats([conversation], rendering=Rendering(add_generation_prompt=False))
    assert (none.text or "").endswith("impo<|im_end|>\n")
    continued = Rendering(add_generation_prompt=False, continue_final_message=True)
    assert (preparer.chats([conversation], rendering=continued)[0].text or "").endswith("assistant\nimpo")
    with pytest.raises(RequestError, match="add_generation_prompt=false"):
        Rendering(continue_final_message=True)


@pytest.mark.parametrize("conversation", [[], "hello", [5], [{"content": "no role"}], [{"role": 5}]])
def test_bad_conversations(preparer: RequestPreparer, conversation: object) -> None:
    with pytest.raises(RequestError):
        preparer.chats([conversation])  # type: ignore[list-item]


def test_a_template_that_refuses_and_one_that_is_missing(tokenizer: Tokenizer, model_path, tmp_path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model_path / name).read_text())
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('system first') }}")
    with pytest.raises(RequestError, match="system first"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}])
    own = Rendering(chat_template="{{ messages[0].content }}!")
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}], own) == "a!"


def test_without_a_tokenizer_only_token_ids() -> None:
    preparer = RequestPreparer(None, vocab_size=10, max_model_len=20, seed=0)
    assert preparer.prompts([{"prompt_token_ids": [1]}])[0].request.prompt_token_ids == [1]
    calls: list[Callable[[], object]] = [
        lambda: preparer.prompts(["text"]),
        lambda: preparer.chats([[{"role": "user", "content": "a"}]]),
        lambda: preparer.prompts([{"prompt_token_ids": [1]}], SamplingParams(stop="x")),
    ]
    for call in calls:
        with pytest.raises(RequestError, match="tokenizer"):
            call()


def test_a_directory_without_a_tokenizer(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="skip_tokenizer_init"):
        Tokenizer(tmp_path)


def test_tokenizer_knows_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == 300


@pytest.mark.parametrize("text", ["x" * 10_000, "a b c " * 400])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized_whole(text: str) -> None:
    limited = Tokenizer(resolve_model_path("tiny"), max_tokens=64)
    preparer = RequestPreparer(limited, vocab_size=4032, max_model_len=64, seed=0)
    with pytest.raises(ContextLengthError, match=rf"{len(text)} characters.*max_model_len = 64"):
        preparer.prompts([text])
    with pytest.raises(ContextLengthError, match=r"characters.*max_model_len = 64"):
        preparer.chats([[{"role": "user", "content": text}]])


def test_a_text_that_fits_is_never_refused_for_its_length() -> None:
    limited = Tokenizer(resolve_model_path("tiny"), max_tokens=64)
    spaces = " " * (60 * 32)  # 60 tokens, longer than what is tokenized for a start
    assert len(limited.encode([spaces])[0]) <= 64


def test_engines_of_one_seed_draw_different_seeds_by_their_names(tokenizer: Tokenizer) -> None:
    def seeds(name: str) -> list[int]:
        preparer = RequestPreparer(tokenizer, vocab_size=600, max_model_len=20, seed=1)
        preparer.draw_seeds_as(name)
        return [p.request.seed for p in preparer.prompts(["a", "b"])]

    assert seeds("first") == seeds("first") != seeds("second")


def test_min_tokens_leaves_a_token_that_ends_nothing() -> None:
    small = RequestPreparer(None, vocab_size=8, max_model_len=64, seed=0, eos_token_ids=(7,))
    prompt, ends = [{"prompt_token_ids": [1]}], list(range(7))
    with pytest.raises(RequestError, match="the whole vocabulary, all of them banned by min_tokens") as caught:
        small.prompts(prompt, SamplingParams(min_tokens=2, stop_token_ids=ends))  # type: ignore[arg-type]
    assert caught.value.param == "min_tokens"
    for params in (
        SamplingParams(stop_token_ids=ends),
        SamplingParams(min_tokens=2, stop_token_ids=ends, ignore_eos=True),
    ):
        small.prompts(prompt, params)  # type: ignore[arg-type]


def test_an_error_names_the_request_whose_text_it_is(preparer: RequestPreparer) -> None:
    with pytest.raises(RequestError, match="Unicode") as caught:
        preparer.prompts(["a", "\ud800"], request_ids=["first", "second"])
    assert caught.value.request_id == "second"
    conversations = [[{"role": "user", "content": text}] for text in ("a", "\ud800")]
    with pytest.raises(RequestError, match="Unicode") as caught:
        preparer.chats(conversations, request_ids=["first", "second"])
    assert caught.value.request_id == "second"


def test_conversations_are_read_as_clients_send_them(preparer: RequestPreparer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = [{"role": "developer", "content": parts, "name": None}, {"role": "assistant", "content": None}]
    [prepared] = preparer.chats([sent])
    assert prepared.text is not None
    assert prepared.text.startswith("<|im_start|>system\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n")
