"""Complete a column of prompts with Ray Data: Parquet in, Parquet out.

    pip install ".[data]"  # in the clone of raypp
    python examples/ray_data_parquet.py [FOLDER]

A row that fails has its error in the column `completion_error`, and the others of its batch their texts.
"""

import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import ray.data

from raypp.batch_job.ray_data import Completer

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    rows = [{"id": i, "prompt": f"def function_{i}("} for i in range(100)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")

    completed = ray.data.read_parquet(str(folder / "prompts.parquet")).map_batches(
        Completer,
        fn_constructor_kwargs={
            "model": "tiny",
            "num_stages": 2,
            "sampling_params": {"max_tokens": 8, "temperature": 0.0},
        },
        batch_size=64,
        concurrency=1,  # engines
        num_cpus=0.1,  # of the actor that starts the engine; the engine asks for its own
    )
    completed.write_parquet(str(folder / "completions"))
    for row in pyarrow.parquet.read_table(folder / "completions").slice(0, 3).to_pylist():
        print(repr(row["prompt"]), "->", repr(row["completion"]))
