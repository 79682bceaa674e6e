"""Make `tests/data/schemas.json.xz`: JSON schemas that packages ship, and that libraries make of classes and tools.

    python tools/schema_corpus/make.py FOLDER

installs the packages below into FOLDER (a virtual environment and `node_modules`; some 900 MB, kept for the next time)
and writes the corpus. Of a source with many definitions a seeded sample is taken, whatever compiles and whatever not.
Descriptions and examples are left out: they bind nothing and are most of the text. Node 20 and a network are needed.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

PYTHON_PACKAGES = (
    "altair==6.3.0",
    "check-jsonschema==0.39.0",
    "kubernetes-validate==1.37.0",
    "langchain-community==0.4.2",
    "langchain-core==1.8.3",
    "mcp==2.3.0",
    "mcp-server-fetch==2026.10.24",
    "mcp-server-git==2026.10.19",
    "mcp-server-time==2026.10.19",
    "nbformat==5.11.1",
    "openai==3.57.0",
    "openai-agents==0.24.0",
    "pydantic==2.14.4",
    "smolagents==1.26.0",
)
NPM_PACKAGES = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
    "@modelcontextprotocol/server-github@2025.4.8",
    "@modelcontextprotocol/server-gitlab@2025.4.25",
    "@modelcontextprotocol/server-memory@2026.8.31",
    "@modelcontextprotocol/server-puppeteer@2025.5.12",
    "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
    "@modelcontextprotocol/server-slack@2025.4.25",
    "@octokit/openapi@23.0.2",
    "zod@4.6.7",
    "zod-to-json-schema@3.25.2",
)
# Under the AGPL and the GPL: not ours to copy.
LEFT_OUT = ("renovate.json", "snapcraft.json")
MAX_CHARS = 300_000  # of a schema: those of a megabyte (azure-pipelines, vega-lite) are there by their definitions

HERE = Path(__file__).parent
CORPUS = HERE.parents[1] / "tests/data/schemas.json.xz"
Entry = dict[str, Any]
"""`source`, `name`, `schema`."""


def main(folder: Path) -> None:
    install(folder)
    site = next((folder / "venv/lib").glob("python3*/site-packages"))
    modules = folder / "npm/node_modules"
    made = [
        *shipped(site),
        *kubernetes(site, 70),
        *github(modules, 60, 90),
        *written_by([folder / "venv/bin/python", HERE / "python_classes.py"], folder),
        *written_by([folder / "venv/bin/python", HERE / "mcp_tools.py", modules], folder),
        *written_by(["node", folder / "npm/zod_classes.mjs"], folder),
    ]
    entries, seen = list[Entry](), set[str]()
    for entry in made:
        entry["schema"] = without_notes(entry["schema"])
        text = json.dumps(entry["schema"], sort_keys=True)
        if text not in seen and len(text) <= MAX_CHARS and not dangling(entry["schema"]):
            seen.add(text)
            entries.append(entry)
    entries.sort(key=lambda entry: (entry["source"], entry["name"]))
    packed = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    CORPUS.write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(entries)} schemas, {CORPUS.stat().st_size:,} bytes")


def install(folder: Path) -> None:
    if not (folder / "venv").exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([folder / "venv/bin/pip", "install", "--quiet", *PYTHON_PACKAGES], check=True)
    npm = folder / "npm"
    if not (npm / "node_modules").exists():
        npm.mkdir(parents=True, exist_ok=True)
        (npm / "package.json").write_text("{}")
        subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", *NPM_PACKAGES], cwd=npm, check=True)
    (npm / "zod_classes.mjs").write_text((HERE / "zod_classes.mjs").read_text())  # it imports from where it lies


def shipped(site: Path) -> Iterator[Entry]:
    vendored = site / "check_jsonschema/builtin_schemas"
    for path in sorted([*vendored.glob("vendor/*.json"), *vendored.glob("custom/*.json")]):
        if path.name not in LEFT_OUT:
            yield from with_definitions("check-jsonschema", path.stem, json.loads(path.read_text()), 8)
    for path in sorted((site / "nbformat").glob("v*/*.schema.json")):
        yield from with_definitions("nbformat", path.name.removesuffix(".schema.json"), json.loads(path.read_text()), 1)
    vega = json.loads((site / "altair/vegalite/v6/schema/vega-lite-schema.json").read_text())
    yield from with_definitions("vega-lite", "vega-lite", vega, 60)


def kubernetes(site: Path, count: int) -> Iterator[Entry]:
    folder = site / "kubernetes_validate/kubernetes-json-schema"
    for strictness in ("local", "local-strict"):
        document = json.loads((folder / f"v1.37.0-{strictness}/_definitions.json").read_text())
        yield from sampled("kubernetes", strictness, document["$defs"], "$defs", count // 2)


def github(modules: Path, num_bodies: int, num_answers: int) -> Iterator[Entry]:
    document = json.loads((modules / "@octokit/openapi/generated/api.github.com.json").read_text())
    definitions = from_openapi(document["components"]["schemas"])
    bodies, answers = dict[str, Any](), dict[str, Any]()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in ("get", "put", "post", "patch", "delete"):
                name = f"{method} {path}"
                found = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                if "schema" in found:
                    bodies[name] = from_openapi(found["schema"])
                for code, answer in operation["responses"].items():
                    found = answer.get("content", {}).get("application/json", {})
                    if code.startswith("2") and "schema" in found:
                        answers[f"{name} {code}"] = from_openapi(found["schema"])
    for kind, schemas, count in (("body", bodies, num_bodies), ("answer", answers, num_answers)):
        for name in random.Random(0).sample(sorted(schemas), count):
            yield entry("github", f"{kind} of {name}", closed_over(schemas[name], definitions, "$defs"))


def from_openapi(part: Any) -> Any:
    """Return a part of an OpenAPI document as JSON schema: references to `$defs`, `nullable` as a type."""
    if isinstance(part, list):
        return [from_openapi(item) for item in part]
    if not isinstance(part, dict):
        return part
    new = {name: from_openapi(value) for name, value in part.items()}
    if isinstance(part.get("$ref"), str):
        new["$ref"] = part["$ref"].replace("#/components/schemas/", "#/$defs/")
    if new.get("nullable") is True:
        del new["nullable"]
        if isinstance(new.get("type"), str):
            new["type"] = [new["type"], "null"]
            if "enum" in new and None not in new["enum"]:
                new["enum"] = [*new["enum"], None]
        else:
            new = {"anyOf": [new, {"type": "null"}]}
    return new


def with_definitions(source: str, name: str, document: Any, count: int) -> Iterator[Entry]:
    """Yield a document, and a sample of its definitions as documents of their own."""
    yield entry(source, name, document)
    for key in ("definitions", "$defs"):
        if isinstance(document.get(key), dict):
            yield from sampled(source, name, document[key], key, count)


def sampled(source: str, name: str, definitions: dict[str, Any], key: str, count: int) -> Iterator[Entry]:
    names = sorted(n for n, schema in definitions.items() if isinstance(schema, dict))
    for chosen in random.Random(0).sample(names, min(count, len(names))):
        schema = closed_over({"$ref": f"#/{key}/{chosen}"}, definitions, key)
        yield entry(source, f"{name}: {chosen}", schema)


def closed_over(schema: Any, definitions: dict[str, Any], key: str) -> Any:
    """Return a schema with those definitions that it refers to, and they."""
    reached, waiting = dict[str, Any](), [schema]
    while waiting:
        for reference in references(waiting.pop()):
            parts = reference.removeprefix(f"#/{key}/").split("/")
            name = unquote(parts[0]).replace("~1", "/").replace("~0", "~")
            if name in definitions and name not in reached:
                reached[name] = definitions[name]
                waiting.append(definitions[name])
    if set(schema) == {"$ref"} and (root := schema["$ref"].rsplit("/", 1)[1]) in reached:
        schema = {**reached[root]}
        everywhere = [reference for part in reached.values() for reference in references(part)]
        if not any(f"{reference}/".startswith(f"#/{key}/{root}/") for reference in everywhere):
            del reached[root]
    return {**schema, key: dict(sorted(reached.items()))} if reached else schema


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def dangling(schema: Any) -> bool:
    """Return whether a schema, a part of a document, refers to another part."""
    for reference in references(schema):
        part = schema
        for name in reference.removeprefix("#").split("/")[1:] if reference.startswith("#/") else []:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and name.isdigit() and int(name) < len(part):
                part = part[int(name)]
            elif isinstance(part, dict) and name in part:
                part = part[name]
            else:
                return True
    return False


def without_notes(part: Any) -> Any:
    """Return a schema without its long notes."""
    if isinstance(part, list):
        return [without_notes(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        name: value if name in ("const", "enum", "default") else without_notes(value)
        for name, value in part.items()
        if not (
            (name in ("description", "markdownDescription", "$comment") and isinstance(value, str))
            or (name == "examples" and isinstance(value, list | str))
            or (name in ("enumDescriptions", "markdownEnumDescriptions") and isinstance(value, list))
            or (name == "example" and not (isinstance(value, dict) and ("type" in value or "$ref" in value)))
        )
    }


def written_by(command: list[Any], folder: Path) -> Iterator[Entry]:
    """Yield the entries that a program prints, one a line."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True, timeout=600)
    for line in done.stdout.decode().splitlines():
        if line.startswith('{"source"'):
            yield json.loads(line)


def entry(source: str, name: str, schema: Any) -> Entry:
    return {"source": source, "name": name, "schema": schema}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
