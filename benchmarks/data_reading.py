"""Measures how fast recorded steps are read in random order, compared with bare pyarrow.

`python -m benchmarks.data_reading` writes a Parquet file of steps (17 numbers of observations, 6 of
actions; as lists of fixed size, and as flat columns) and takes turns: a `BlockReader` that returns
shuffled batches of 2000 rows, in this process (`trusted=True`) and with a child process that
parses, and `ParquetFile.iter_batches` to NumPy arrays in the order of the file, in batches of the
same size and of 65536 rows. Rates are the best of the rounds. `--memory` reads files of a million
and of ten million rows in fresh processes, and prints the largest memory of each. The exit code is
1 if ours is less than half as fast as pyarrow with batches of the same size.
"""

import argparse
import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from rich.console import Console
from rich.table import Table

from tfpolicies.offline.block_reader import BlockReader
from tfpolicies.offline.open_data import open_data

WIDTHS = {"obs": 17, "actions": 6}
BATCH_ROWS, GROUP_ROWS = 2000, 1 << 16
BARE = {"pyarrow, 2000 rows": BATCH_ROWS, "pyarrow, 65536 rows": 1 << 16}  # per batch
LEAST = 0.5  # of the rate of bare pyarrow


def write_file(path: Path, rows: int, flat: bool) -> None:
    """Writes random steps."""
    rng = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, GROUP_ROWS):
        count = min(GROUP_ROWS, rows - start)
        arrays: dict[str, pa.Array] = {}
        for name, width in WIDTHS.items():
            values = rng.standard_normal((count, width), np.float32)
            if flat:
                arrays |= {f"{name}{i}": pa.array(values[:, i]) for i in range(width)}
            else:
                arrays[name] = pa.FixedSizeListArray.from_arrays(values.ravel(), width)
        table = pa.table(arrays)
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def read_ours(path: Path, trusted: bool, shuffle_rows: int) -> Callable[[int], int]:
    """Returns a function that reads shuffled batches until there are at least that many rows."""
    source = open_data(path, trusted=trusted)
    reader = BlockReader(source, None, seed=0, shuffle_rows=shuffle_rows)

    def iter_batches() -> Iterator[dict[str, np.ndarray]]:
        while True:
            block = reader.read_block()
            names = block.chunks[0].columns
            columns = {
                name: np.concatenate([chunk.columns[name] for chunk in block.chunks])
                for name in names
            }
            order = reader.draw_order(block, len(next(iter(columns.values()))))
            for start in range(0, len(order), BATCH_ROWS):
                taken = order[start : start + BATCH_ROWS]
                yield {name: column.take(taken, axis=0) for name, column in columns.items()}

    batches = iter_batches()

    def read(rows: int) -> int:
        count = 0
        while count < rows:
            count += len(next(iter(next(batches).values())))
        return count

    return read


def read_bare(path: Path, batch_rows: int) -> Callable[[int], int]:
    """Returns a function that reads batches in order until there are at least that many rows."""

    def iter_batches() -> Iterator[list[np.ndarray]]:
        while True:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_rows):
                    yield [to_numpy(batch.column(i)) for i in range(batch.num_columns)]

    batches = iter_batches()

    def read(rows: int) -> int:
        count = 0
        while count < rows:
            count += len(next(batches)[0])
        return count

    return read


def to_numpy(column: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(column.type):
        values: np.ndarray = column.flatten().to_numpy().reshape(len(column), -1)
        return values
    result: np.ndarray = column.to_numpy()
    return result


def compare(path: Path, rows: int, rounds: int, shuffle_rows: int) -> dict[str, float]:
    """Returns the best rate of each reader, in rows per second."""
    readers = {
        **{name: read_bare(path, size) for name, size in BARE.items()},
        "in this process": read_ours(path, True, shuffle_rows),
        "in a child process": read_ours(path, False, shuffle_rows),
    }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for read in readers.values():
        read(BATCH_ROWS)
    for _ in range(rounds):
        for name, read in readers.items():
            start = time.perf_counter()
            rates[name].append(read(rows) / (time.perf_counter() - start))
    return {name: max(values) for name, values in rates.items()}


def print_memory(path: Path, trusted: bool, shuffle_rows: int) -> None:
    """Reads a file once, and prints the largest memory of this process and its child in MB."""
    rows = parquet.read_metadata(path).num_rows
    read = read_ours(path, trusted, shuffle_rows)
    read(rows)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    del read  # ends the child process
    gc.collect()
    print(f"{own} and {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10}")


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shuffle-rows", type=int, default=100_000)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--pass-over", nargs=2, metavar=("FILE", "TRUSTED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pass_over:
        print_memory(Path(options.pass_over[0]), options.pass_over[1] == "1", options.shuffle_rows)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if options.memory:
            return measure_memory(Path(folder), options.shuffle_rows)
        table = Table("columns", "reader", "rows/s", *(f"of {name}" for name in BARE))
        least = 1.0
        for kind in ("lists", "flat"):
            path = Path(folder, f"{kind}.parquet")
            write_file(path, options.rows, kind == "flat")
            rates = compare(path, options.rows, options.rounds, options.shuffle_rows)
            for name, rate in rates.items():
                ratios = [rate / rates[bare] for bare in BARE]
                table.add_row(kind, name, f"{rate:,.0f}", *(f"{ratio:.2f}" for ratio in ratios))
                least = min(least, ratios[0]) if name not in BARE else least
        Console().print(table)
        return int(least < LEAST)


def measure_memory(folder: Path, shuffle_rows: int) -> int:
    """Prints the largest memory of passes over a small and a large file."""
    for rows in (1_000_000, 10_000_000):
        path = folder / f"{rows}.parquet"
        write_file(path, rows, flat=False)
        for trusted in ("1", "0"):
            arguments = ["--pass-over", str(path), trusted, "--shuffle-rows", str(shuffle_rows)]
            command = [sys.executable, "-m", "benchmarks.data_reading", *arguments]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{rows} rows, trusted={trusted == '1'}: {result.stdout.strip()} MB")
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
