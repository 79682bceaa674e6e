"""What is wrong with a model's files, a chat template, prompts or API keys is said before anything starts."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from raypp import LLM
from raypp.actors.cluster import Cluster
from raypp.api.tokenizer import Tokenizer
from raypp.cli.main import EntryPoints, main
from raypp.config.engine_config import EngineConfig
from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.errors import ConfigError, ModelLoadError
from serve_app.run import run_server

TINY = Path(str(resources.files("raypp") / "assets/tiny"))
BROKEN = [
    "{% for message in messages %}{{ message.content }}",
    "{% if %}{% endif %}",
    "{{ messages[0].content | no_such_filter }}",
    "{{ no_such_function() }}",
    "{{ messages[0].content + 1 }}",
]
RENDERS = [
    "{% for message in messages %}{{ message.content }}{% endfor %}",
    "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[0].content[0]['text'] + '' }}",
    "{{ raise_exception('this model wants a system message first') }}",
]


@pytest.fixture(autouse=True)
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(Cluster, "connect", fail)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., str]:
    """Return what makes a copy of tiny without some of its files."""

    def make(*without: str) -> str:
        folder = tmp_path / "model"
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns(*without))
        return str(folder)

    return make


def free_address() -> HttpAddress:
    """Return an address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return HttpAddress(port=int(probe.getsockname()[1]))


def start(how: str, model: str, **settings: Any) -> None:
    """Start an engine in one of the ways that users do."""
    config = EngineConfig.from_flat(model, **settings)
    if how == "python":
        LLM(config)
    elif how == "serve":
        run_server(config, HttpSettings(), address=free_address(), on_ready=print, read_again=lambda: config)
    else:
        EntryPoints().describe(config)


WAYS = ["python", "serve", "info"]


@pytest.mark.parametrize("how", WAYS)
def test_a_model_without_a_tokenizer(copy: Callable[..., str], how: str) -> None:
    with pytest.raises(ModelLoadError, match=r"the model has no tokenizer.*tokenizer\.json.*skip_tokenizer_init"):
        start(how, copy("tokenizer*"))


def test_its_files_are_missed_before_seconds_of_imports(
    copy: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypp.api.tokenizer.tokenizer_class", lambda path: pytest.fail("transformers is imported"))
    with pytest.raises(ModelLoadError, match="the model has no tokenizer; got: a folder without its files"):
        Tokenizer(copy("tokenizer.json"))


def test_a_tokenizer_that_transformers_makes_up_is_none(copy: Callable[..., str]) -> None:
    path = Path(copy("tokenizer*"))
    (path / "vocab.txt").touch()
    with pytest.raises(ModelLoadError, match="the model has no tokenizer; got: 1 tokens in all: none but added ones"):
        Tokenizer(path)


@pytest.mark.parametrize("how", WAYS)
def test_a_broken_chat_template_is_a_mistake_of_the_configuration(how: str) -> None:
    with pytest.raises(ConfigError, match=r"the given chat template is broken.*TemplateSyntaxError.*line 1"):
        start(how, "tiny", chat_template=BROKEN[0])


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_renders_no_question_is_broken(template: str) -> None:
    with pytest.raises(ConfigError, match="the given chat template is broken"):
        Tokenizer(TINY, chat_template=template)


@pytest.mark.parametrize("template", RENDERS)
def test_a_template_with_reasons_of_its_own_is_not(template: str) -> None:
    assert Tokenizer(TINY, chat_template=template).chat_template == template


def test_the_models_own_template_may_be_broken_too(copy: Callable[..., str]) -> None:
    folder = copy("chat_template.jinja")
    (Path(folder) / "chat_template.jinja").write_text(BROKEN[1])
    with pytest.raises(ModelLoadError, match=r"the model's chat template is broken.*chat_template"):
        Tokenizer(folder)
    assert Tokenizer(folder, chat_template=RENDERS[0]).chat_template == RENDERS[0]


def test_info_needs_no_tokenizer_beside_a_config_alone(copy: Callable[..., str]) -> None:
    assert EntryPoints().describe(EngineConfig.from_flat(copy("tokenizer*", "*.safetensors")))["fit"]


def test_a_file_of_keys_that_is_not_there() -> None:
    config = EngineConfig.from_flat("tiny")
    with pytest.raises(ConfigError, match=r"cannot be read.*expected: .*one key per line.*hint: .*api_key_file"):
        run_server(
            config,
            HttpSettings(api_key_file="/nonexist"),
            address=free_address(),
            on_ready=print,
            read_again=lambda: config,
        )


def refuse_to_open(_: EngineConfig) -> Any:
    pytest.fail("an engine was started")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--prompt", ""], "a prompt has no tokens"),
        (["tiny", "--prompt", "Hello", "--image", __file__], "this model takes no images"),
        (["tiny-vl", "--prompt", "Hello", "--image", "/nonexist.png"], "an image file cannot be read"),
        (["tiny-vl", "--prompt", "Hello", "--image", __file__], "image"),
    ],
)
def test_prompts_that_no_engine_of_the_model_takes(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["generate", *arguments], entry_points=EntryPoints(open_llm=refuse_to_open)) == 2
    assert said in capsys.readouterr().err


def test_an_empty_prompt_is_one_of_a_model_that_puts_a_token_before_it(copy: Callable[..., str]) -> None:
    folder = Path(copy())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = next(token for token in tokenizer["added_tokens"])
    special = {"id": first["content"], "ids": [first["id"]], "tokens": [first["content"]]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first["content"]: special},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    class OpenedError(Exception): ...

    def open_it(_: EngineConfig) -> Any:
        raise OpenedError

    with pytest.raises(OpenedError):
        main(["generate", str(folder), "--prompt", ""], entry_points=EntryPoints(open_llm=open_it))
