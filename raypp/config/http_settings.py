"""Settings of the HTTP server, and where it listens. Each setting's docstring is its documentation."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from raypp.config.sections import Section
from raypp.errors import ConfigError

UnknownFields = Literal["refuse", "warn"]

_OF_AUTOSCALING = {
    "min_replicas",
    "target_ongoing_requests",
    "upscale_delay_s",
    "downscale_delay_s",
    "drain_timeout_s",
}


class HttpSettings(Section):
    """The server, and the engines behind it."""

    served_model_name: list[str] = Field(default=[], max_length=64)
    """The names that requests may call the model by; the first is the one in answers. Empty: the model's own."""
    num_replicas: int = Field(default=1, ge=1)
    """Engines behind the same address. Each has its own placement group. With `max_replicas`: as many at the start."""
    min_replicas: int = Field(default=1, ge=1)
    """With `max_replicas`: the fewest engines."""
    max_replicas: int | None = Field(default=None, ge=1)
    """The most engines: their number then follows the requests that run and wait. None: there are `num_replicas`."""
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    """With `max_replicas`: requests per engine, waiting ones included, at which the number is right. By default
    `max_num_seqs`: another engine is started when requests wait for a row."""
    upscale_delay_s: float = Field(default=30.0, ge=0)
    """With `max_replicas`: how long there must be too many requests before an engine is added."""
    downscale_delay_s: float = Field(default=600.0, ge=0)
    """With `max_replicas`: how long there must be too few before one is taken away."""
    drain_timeout_s: float = Field(default=300.0, gt=0)
    """With `max_replicas`: how long an engine that is taken away may go on answering what it has."""
    prefix_routing: bool = True
    """With several engines: send a request to the one that probably has the beginning of its prompt in its cache."""
    prefix_routing_max_excess: int = Field(default=4, ge=0)
    """Requests that this engine may have beyond 1.5 times those of the least busy one; then the latter gets it."""
    replica_num_cpus: float = Field(default=0.01, ge=0)
    """CPUs that a replica's HTTP process asks Ray for. Placement only."""
    replica_resources: dict[str, float] = Field(default={})
    """Ray resources that a replica must find on its node, e.g. `{"accelerator_type:H200": 0.001}`: the engine is
    planned for the hardware of that node."""
    api_keys: list[str] = Field(default=[])
    """Keys of which requests must bring one as `Authorization: Bearer KEY`. Empty, and no file: any client may call."""
    api_key_file: str | None = None
    """A file with one more key per line. A key in a file does not show in the process list."""
    cors_origins: list[str] = Field(default=[])
    """Web pages of other origins that may call from a browser, e.g. `https://example.org`, or `*`. Empty: none."""
    unknown_fields: UnknownFields = "warn"
    """Fields of a body that raypp does not know. `warn` ignores them, and says so: once each in the log, and in the
    answer's header X-Raypp-Ignored-Fields. `refuse` answers 400. Both refuse what looks like a misspelt field, and
    fields of other servers that would change the answer: docs/http_api.md."""
    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    """The largest request body; larger ones are refused with 413."""
    max_queued_requests: int = Field(default=1024, ge=0)
    """Requests (each of `n` counts) that may wait beside the `max_num_seqs` that run; more are refused with 429."""
    max_unfinished_tokens: int = Field(default=1 << 23, ge=1)
    """Prompt tokens of all unfinished requests of a replica; more are refused with 429."""
    max_sequences_per_request: int = Field(default=256, ge=1)
    """Sequences that one body may ask for, prompts times `n`; more are refused with 400."""
    max_tokens_per_request: int = Field(default=1 << 20, ge=1)
    """Prompt tokens that one body with several prompts may bring; more are refused with 400."""
    max_encodes: int = Field(default=8, ge=1)
    """Requests whose images are encoded at once, over all replicas: more wait."""
    max_encodes_waiting: int = Field(default=64, ge=0)
    """Requests with images that may wait for that, of each replica; more are refused with 429."""
    stream_keep_alive_s: float = Field(default=15.0, gt=0)
    """The longest silence of a stream: a comment goes out where there is nothing else, so that no proxy cuts it."""
    health_check_period_s: float = Field(default=0.5, gt=0)
    """How often Ray Serve asks a replica for its health. After three times unhealthy it is replaced."""
    control_routes: bool = False
    """Offer `POST /reset_prefix_cache` and `GET /server_info`, for benchmarks and training loops. With API keys, any
    key may use them."""
    vllm_metrics: bool = False
    """Show series of `/metrics` under vLLM's names, too (`vllm:num_requests_running`), for dashboards, autoscalers and
    routers that were made for it."""
    ray_metrics_period_s: float = Field(default=5.0, ge=0)
    """How often Ray's own metrics are updated from those of `/metrics`; 0: never."""
    live_period_s: float = Field(default=0.2, gt=0)
    """How often the page's live image is renewed, while it is open in a browser."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.max_replicas is None:
            given = sorted(self.model_fields_set & _OF_AUTOSCALING)
            if given:
                raise ConfigError(
                    f"{given[0]} needs max_replicas",
                    got=f"{given[0]} = {getattr(self, given[0])}",
                    hint=f"set max_replicas, or leave {given[0]} out",
                )
        elif not max(self.min_replicas, self.num_replicas) <= self.max_replicas:
            raise ConfigError(
                "max_replicas is below min_replicas or num_replicas",
                got=f"min_replicas = {self.min_replicas}, num_replicas = {self.num_replicas}, "
                f"max_replicas = {self.max_replicas}",
                expected="the largest of the three",
            )
        return self

    def keys(self) -> list[str]:
        """Return all API keys.

        Raises:
            ConfigError: the file cannot be read, or holds no key.
        """
        if self.api_key_file is None:
            return self.api_keys
        try:
            with open(self.api_key_file, encoding="utf-8") as file:
                found = [line.strip() for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the file of API keys cannot be read",
                got=error,
                expected="a text file with one key per line, in UTF-8",
                hint="correct the path in api_key_file, or let the server's user read the file",
            ) from error
        if not found:  # an empty file would otherwise let any client in
            raise ConfigError("the file of API keys holds no key", got=self.api_key_file, expected="one key per line")
        return [*self.api_keys, *found]


class HttpAddress(Section):
    """Where the server is reached. `serve run` has options of its own for it."""

    host: str = "127.0.0.1"
    """Where to listen. `0.0.0.0`: on all interfaces."""
    port: int = Field(default=8000, ge=1, le=65535)
    """The TCP port."""
    app_name: str = Field(default="raypp", min_length=1)
    """The application's name on the Ray cluster."""
    route_prefix: str = "/"
    """What its paths begin with: several applications of a cluster share one port."""

    root_path: str = ""
    """What a reverse proxy in front of the server takes off the paths, e.g. `/llm`."""
    ssl_certfile: str | None = None
    """A certificate in PEM, the chain behind it: the server then speaks HTTPS. Each node of a cluster that has one of
    Serve's proxies must have the file."""
    ssl_keyfile: str | None = None
    """Its private key in PEM, without a password."""

    @field_validator("route_prefix")
    @classmethod
    def _is_prefix(cls, prefix: str) -> str:
        if not prefix.startswith("/") or (prefix != "/" and prefix.endswith("/")) or set(prefix) & set("{}"):
            raise ConfigError("not a route prefix", got=prefix, expected="/, or a path like /second")
        return prefix

    @field_validator("root_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ConfigError("not a root path", got=path, expected="a path like /llm, or nothing")
        return path

    @model_validator(mode="after")
    def _certificate_is_one(self) -> Self:
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return self
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            given = "ssl_keyfile" if self.ssl_certfile is None else "ssl_certfile"
            raise ConfigError("HTTPS needs a certificate and its key", got=f"{given} alone", expected="both files")
        try:  # else Serve's proxies fail one after the other
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.ssl_certfile, self.ssl_keyfile, password=lambda: b""
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                "the certificate cannot be used",
                got=f"{self.ssl_certfile}, {self.ssl_keyfile}: {error}",
                expected="a certificate and its key in PEM, without a password",
            ) from error
        return self

    @property
    def url(self) -> str:
        """The address of its root."""
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{self.host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def of_serve(self) -> dict[str, str | None]:
        """Options for Serve's start, beside host and port."""
        return {name: getattr(self, name) for name in ("root_path", "ssl_certfile", "ssl_keyfile")}


_Settings = TypeVar("_Settings", HttpSettings, HttpAddress)


def http_settings(cls: type[_Settings], given: Mapping[str, object]) -> _Settings:
    """Return settings of the server.

    Raises:
        ConfigError: a value that cannot be.
    """
    try:
        return cls.model_validate_json(json.dumps(dict(given), default=os.fspath))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"invalid value for {name}",
            got=repr(first.get("input")),
            expected=first["msg"].removeprefix("Input should be ").removeprefix("a valid "),
            hint=f"{name}: {cls.model_fields[name].description}",
        ) from None
