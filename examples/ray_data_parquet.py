"""Complete a column of prompts with Ray Data: Parquet in, Parquet out.

    python examples/ray_data_parquet.py --input prompts.parquet --output completions/

Without --input a small file of prompts is made. Needs pip install "raypp[data]".
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import ray.data

from raypp.batch_job.ray_data import Completer


def main() -> None:
    """Read, complete, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, help="Parquet with a column `prompt`")
    parser.add_argument("--output", type=Path, required=True, help="a folder, which gets one Parquet file per block")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()

    prompts = ray.data.read_parquet(str(args.input or make_prompts(Path(tempfile.mkdtemp()))))
    completed = prompts.map_batches(
        Completer,
        fn_constructor_kwargs={
            "model": args.model,
            "num_stages": args.num_stages,
            "sampling_params": {"max_tokens": args.max_tokens, "temperature": 0.0},
        },
        batch_size=64,
        concurrency=1,
        num_cpus=0.1,  # of the actor that the engine is started from; the engine asks for its own
    )
    completed.write_parquet(str(args.output))
    for row in pyarrow.parquet.read_table(args.output).slice(0, 3).to_pylist():
        print(repr(row["prompt"]), "->", repr(row["completion"]))


def make_prompts(folder: Path) -> Path:
    """Write a Parquet file with a few prompts and return its path."""
    path = folder / "prompts.parquet"
    rows = [{"id": i, "prompt": f"def function_{i}("} for i in range(100)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


if __name__ == "__main__":
    main()
