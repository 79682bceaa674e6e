"""No file imports itself by way of others: whoever reads one need not have read all of a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from repository import name_of, project_files

PACKAGES = ("raypp", "serve_app")


def module_name(file: str) -> str:
    """Return what a file of a package is imported as; scripts find each other by their bare names."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts) if parts[0] in PACKAGES else parts[-1]


def imported_names(source: str) -> Iterator[str]:
    """Yield what a file imports, anywhere: imports in functions and for type checkers count like others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return the imports of every circle, `from -> to`, of files given by their names: [] when there is no circle."""
    file_of = {module_name(file): file for file in sources}

    def imported_files(file: str) -> set[str]:
        # A name is that of a module, or of something in one.
        found = {file_of.get(name) or file_of.get(name.rpartition(".")[0]) for name in imported_names(sources[file])}
        return {other for other in found if other and other != file}

    imports = {file: imported_files(file) for file in sources}

    def reached_from(file: str) -> set[str]:
        reached: set[str] = set()
        left = [*imports[file]]
        while left:
            found = left.pop()
            if found not in reached:
                reached.add(found)
                left += imports[found]
        return reached

    reached = {file: reached_from(file) for file in imports}
    circles = {frozenset(other for other in reached[file] if file in reached[other]) for file in imports}
    return [
        [f"{file} -> {other}" for file in sorted(circle) for other in sorted(imports[file] & circle)]
        for circle in sorted(filter(None, circles), key=min)
    ]


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = [path for path in project_files(".py") if name_of(path).split("/")[0] in (*PACKAGES, "tools", "benchmarks")]
    circles = import_circles({name_of(path): path.read_text() for path in files})
    assert not circles, "\n".join(["files import each other in circles:", *map("\n    ".join, circles)])


def test_circles_are_found() -> None:
    circles = import_circles(
        {
            "raypp/a.py": "from raypp.b import thing",
            "raypp/b.py": "def late():\n    from raypp import c",
            "raypp/c.py": "if TYPE_CHECKING:\n    from raypp.a import Thing",
            "raypp/d.py": "import raypp.a\nimport tool",
            "raypp/e/__init__.py": "from raypp.e.f import thing",
            "raypp/e/f.py": "from raypp.e import thing",
            "tools/tool.py": "import other",
            "tools/other.py": "import json",
        }
    )
    assert circles == [
        ["raypp/a.py -> raypp/b.py", "raypp/b.py -> raypp/c.py", "raypp/c.py -> raypp/a.py"],
        ["raypp/e/__init__.py -> raypp/e/f.py", "raypp/e/f.py -> raypp/e/__init__.py"],
    ]
