"""Engines in a notebook: running the cell that starts one again replaces it.

`llm = LLM(...)` in a cell that runs a second time would first start the new engine and only then let go of the old one:
two models in memory, or none where the old one holds the GPUs. So before an engine starts, those that the running cell
is about to assign anew are closed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Replaceable(Protocol):
    """An engine as a notebook holds it."""

    def close_when_replaced(self) -> None:
        """Close, from any thread, without waiting for an event loop."""


def close_replaced_engines() -> None:
    """Close the engines whose names the running cell assigns. Outside of a notebook there are none."""
    shell = _shell()
    if shell is None:
        return
    for engine in engines_replaced_by(_running_cell(shell), shell.user_ns):
        engine.close_when_replaced()


def engines_replaced_by(source: str, namespace: Mapping[str, object]) -> list[Replaceable]:
    """Return the engines that a cell assigns anew.

    Args:
        source: The cell's.
        namespace: What its names mean before it runs.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # it ran, so this is not Python of the kind that binds names
        return []
    found: dict[int, Replaceable] = {}
    for name in _assigned_names(tree):
        value = namespace.get(name)
        if isinstance(value, Replaceable) and not isinstance(value, type):
            found[id(value)] = value
    return list(found.values())


def _assigned_names(tree: ast.Module) -> Iterable[str]:
    """Yield the names that the cell itself binds; what its functions and classes bind inside is theirs."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        waiting.extend(ast.iter_child_nodes(node))


def _shell() -> Any:
    """Return IPython's shell if this process is one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def _running_cell(shell: Any) -> str:
    inputs = shell.history_manager.input_hist_parsed  # magics are Python calls here; the running cell is the last
    return str(inputs[-1]) if inputs else ""
