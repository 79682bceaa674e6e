"""Run docs/notebooks/quickstart.ipynb in a fresh kernel, and keep its pictures.

python tools/run_notebook.py                    run it, write its outputs into it and its pictures to docs/images
python tools/run_notebook.py --output x.ipynb   run it, write the result elsewhere, pictures beside it
"""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "quickstart.ipynb"
_CELL_TIMEOUT_S = 300


def run_notebook(source: Path = NOTEBOOK) -> Any:
    """Return the notebook, run from its first cell to its last in a fresh kernel.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(source, as_version=4)
    # Sockets that only this user can reach, in place of open ports.
    config = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        config=config,
    ).execute()
    return notebook


def without_noise(notebook: Any) -> Any:
    """Return the notebook without what belongs to one machine: warnings, progress bars, Python's version."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if _is_worth_keeping(output)]
    notebook.metadata.pop("language_info", None)
    return notebook


def _is_worth_keeping(output: Any) -> bool:
    return output.get("name") != "stderr" and "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


def pictures(notebook: Any) -> dict[str, bytes]:
    """Return the pictures of a notebook that was run, as PNG, by the `picture` in their cells' metadata."""
    found = {}
    for cell in notebook.cells:
        name = cell.metadata.get("picture")
        if name is not None:
            images = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
            found[name] = base64.b64decode(images[-1])
    return found


def main() -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the result goes; default: the notebook itself")
    output = parser.parse_args().output
    notebook = run_notebook()
    target, folder = (output, output.parent) if output is not None else (NOTEBOOK, ROOT / "docs" / "images")
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(without_noise(notebook), target)
    for name, png in pictures(notebook).items():
        (folder / f"{name}.png").write_bytes(png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
