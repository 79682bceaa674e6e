"""The clients that are tried, and how an environment of its own is made for each of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
_UNREACHABLE = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "NameResolutionError",
    "ReadTimeoutError",
    "ProxyError",
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
)
"""What pip and npm say when they cannot reach their registry."""
_INSTALL_LIMIT_S = 900
_RUN_LIMIT_S = 300


class RegistryUnreachableError(Exception):
    """A package could not be had, since its registry could not be reached."""


@dataclass(frozen=True)
class Client:
    """A client: its program, and what that needs."""

    name: str
    requirements: tuple[str, ...]
    """As pip or npm takes them."""
    program: str

    @property
    def is_node(self) -> bool:
        """Whether it is JavaScript."""
        return self.program.endswith(".mjs")


CLIENTS = {
    client.name: client
    for client in (
        Client("openai", ("openai==3.54.0",), "use_openai.py"),
        Client("langchain", ("langchain-openai==1.7.3", "langchain-core==1.7.2"), "use_langchain.py"),
        Client("litellm", ("litellm==1.106.2", "mcp==2.3.0"), "use_litellm.py"),
        Client("instructor", ("instructor==1.17.0",), "use_instructor.py"),
        Client("pydantic_ai", ("pydantic-ai-slim[openai]==2.68.0",), "use_pydantic_ai.py"),
        Client("llama_index", ("llama-index-llms-openai-like==0.8.1",), "use_llama_index.py"),
        Client("lm_eval", ("lm_eval[api]==0.4.13", "transformers==5.17.0"), "use_lm_eval.py"),
        Client("guidance", ("guidance==0.3.1", "openai==3.54.0"), "use_guidance.py"),
        Client("anthropic", ("anthropic==2.14.0",), "use_anthropic.py"),
        Client("claude_code", ("@anthropic-ai/claude-code@2.1.197",), "use_claude_code.mjs"),
        Client("openai_agents", ("openai-agents==0.24.0",), "use_openai_agents.py"),
        Client("ai_sdk", ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"), "use_ai_sdk.mjs"),
        Client("ai_sdk_openai", ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7"), "use_ai_sdk_openai.mjs"),
        Client("codex", ("@openai/codex@0.169.0",), "use_codex.mjs"),
    )
}

CONFORMANCE = {
    program.name: program
    for program in (
        Client("llm_comply", ("llm-comply==0.5.0",), "use_llm_comply.py"),
        Client("compatcanary", ("compatcanary@0.2.2",), "use_compatcanary.mjs"),
    )
}
"""Programs that check a server; they ask `tiny-vl`, and are not recorded: the lengths of their answers are chance."""


class Environment:
    """Where a client's packages are installed."""

    def __init__(self, client: Client, folder: Path) -> None:
        """Install them, unless that has been done.

        Args:
            client: Whose packages.
            folder: Made if it is not there.

        Raises:
            RegistryUnreachableError: a registry cannot be reached.
            RuntimeError: a package cannot be installed for another reason.
        """
        self._client = client
        self._folder = folder
        self._python = folder / "bin" / "python"
        done = folder / ".installed"
        wanted = "\n".join(client.requirements)
        if done.exists() and done.read_text() == wanted:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if client.is_node:
            (folder / "package.json").write_text("{}")
            npm = ["npm", "install", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefer-offline"]
            _install([*npm, "--prefix", str(folder), *client.requirements])
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_LIMIT_S)
            _install([str(self._python), "-m", "pip", "install", "--quiet", "--retries=1", *client.requirements])
        done.write_text(wanted)

    def run(self, base_url: str) -> None:
        """Run the client's program.

        Args:
            base_url: The address of /v1.

        Raises:
            RuntimeError: it failed; says what it printed last.
        """
        program = PROGRAMS / self._client.program
        if self._client.is_node:
            program = Path(shutil.copy(program, self._folder))  # Node looks for packages beside the program
        command = ["node" if self._client.is_node else str(self._python), str(program), base_url]
        # Only the environment's own packages: neither this project's folder nor its interpreter's are on its path.
        environment = {"PATH": _path(), "HOME": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_LIMIT_S, env=environment)
        if done.returncode:
            raise RuntimeError(f"{self._client.name} failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")

    def versions(self) -> dict[str, str]:
        """Return the versions of what the client asks for, and of the package it speaks to servers with."""
        if self._client.is_node:
            names = [requirement.rpartition("@")[0] for requirement in self._client.requirements]
            files = {name: self._folder / "node_modules" / name / "package.json" for name in names}
            return {name: json.loads(file.read_text())["version"] for name, file in files.items()}
        listed = subprocess.run(
            [str(self._python), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_RUN_LIMIT_S,
        )
        names = [requirement.partition("==")[0].partition("[")[0] for requirement in self._client.requirements]
        return {
            package["name"]: package["version"]
            for package in json.loads(listed.stdout)
            if package["name"] in [*names, "openai"]
        }


def _install(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
    if not done.returncode:
        return
    if said := [word for word in _UNREACHABLE if word in done.stderr]:
        raise RegistryUnreachableError(f"the package registry cannot be reached ({said[0]})")
    raise RuntimeError(f"{' '.join(command)} failed\n{done.stderr[-4000:]}")


def _path() -> str:
    node = shutil.which("node")
    return ":".join(["/usr/bin", "/bin", *([str(Path(node).parent)] if node else [])])
