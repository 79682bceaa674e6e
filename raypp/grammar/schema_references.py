"""Where the parts of a JSON schema are: its subschemas, and what `$ref` and its like name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from raypp.errors import RequestError
from raypp.grammar.schema_check import MAX_SCHEMA_DEPTH, MAX_SCHEMA_NODES, cannot_be_enforced

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    *("items", "contains", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else"),
)


class References:
    """The parts of one schema, by name and by place. A part is known by its identity: it must not be copied."""

    def __init__(self, root: Any) -> None:
        """Find all parts.

        Raises:
            RequestError: the schema is too large, or something in it is no schema.
        """
        self._paths: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._num_dynamic: Counter[str] = Counter()
        self._resources[""] = root
        open_nodes = [(root, "#", "", 0)]
        while open_nodes:
            node, path, base, depth = open_nodes.pop()
            if depth > MAX_SCHEMA_DEPTH:
                raise cannot_be_enforced(path, f"nesting deeper than {MAX_SCHEMA_DEPTH}")
            if len(self._paths) > MAX_SCHEMA_NODES:
                raise cannot_be_enforced("the schema", f"more than {MAX_SCHEMA_NODES:,} parts")
            if isinstance(node, bool):
                continue
            if not isinstance(node, dict):
                raise cannot_be_enforced(path, f"{str(node)[:40]!r} in place of a schema")
            base = self._note(node, path, base)
            open_nodes += [(child, f"{path}/{name}", base, depth + 1) for name, child in _children(node, path)]

    def path_of(self, node: dict[str, Any]) -> str:
        """Return the place of a part."""
        return self._paths[id(node)]

    def adopt(self, node: dict[str, Any], parent: dict[str, Any]) -> None:
        """Take in a part that was made of another one, for errors to name its place."""
        self._paths[id(node)], self._bases[id(node)] = self._paths[id(parent)], self._bases[id(parent)]

    def target(self, node: dict[str, Any], keyword: str) -> Any:
        """Return what a part's `$ref` or `$dynamicRef` names.

        Raises:
            RequestError: it names nothing in this schema, or what it names depends on who refers to it.
        """
        reference = node[keyword]
        found = self._find(reference, self._bases[id(node)]) if isinstance(reference, str) else None
        if found is None or not (isinstance(found, bool) or id(found) in self._paths):
            what = f"{keyword} to {str(reference)[:80]!r}: it has to name a part of the schema itself"
            raise cannot_be_enforced(self.path_of(node), what)
        if keyword == "$dynamicRef" and isinstance(found, dict):
            name = found.get("$dynamicAnchor")
            if name is not None and reference.endswith(f"#{name}") and self._num_dynamic[name] > 1:
                raise cannot_be_enforced(self.path_of(node), f"$dynamicRef to one of several {str(name)[:40]!r}")
        return found

    def _note(self, node: dict[str, Any], path: str, base: str) -> str:
        if isinstance(node.get("$id"), str):
            try:
                base = urldefrag(urljoin(base, node["$id"])).url
            except ValueError:
                raise cannot_be_enforced(path, f"$id {node['$id'][:80]!r}, which is no address") from None
            self._resources[base] = node
        elif path == "#":
            self._resources[base] = node
        self._paths[id(node)], self._bases[id(node)] = path, base
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(keyword), str):
                self._anchors[base, node[keyword]] = node
                self._num_dynamic[node[keyword]] += keyword == "$dynamicAnchor"
        return base

    def _find(self, reference: str, base: str) -> Any:
        try:
            address, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        except ValueError:
            return None
        found, fragment = self._resources.get(address), unquote(fragment)
        if not fragment or found is None:
            return found
        return _pointed(found, fragment) if fragment[0] == "/" else self._anchors.get((address, fragment))


def _pointed(node: Any, pointer: str) -> Any:
    for part in pointer[1:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _children(node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        if name in node:
            yield from ((f"{name}/{key}", child) for key, child in _given(node, name, dict, path).items())
    for name in _LISTS:
        if name in node:
            yield from ((f"{name}/{index}", child) for index, child in enumerate(_given(node, name, list, path)))
    yield from ((name, node[name]) for name in _SINGLE if name in node)


def _given(node: dict[str, Any], name: str, kind: type, path: str) -> Any:
    if not isinstance(node[name], kind):
        raise malformed(path, node, name)
    return node[name]


def malformed(path: str, node: dict[str, Any], name: str) -> RequestError:
    """Return the error of a keyword with a value that it cannot have."""
    return cannot_be_enforced(path, f"{name} {str(node[name])[:40]!r}, which is no value for it")
