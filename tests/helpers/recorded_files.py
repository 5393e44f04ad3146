"""Files of recorded steps, and reading all rows of a data source."""

import json

import numpy as np

from tfpolicies.offline.data_source import ReadRequest


def write_parquet(path, columns, group_rows=None, **options):
    """Writes columns, NumPy or Arrow arrays or lists, as a Parquet file; returns the path."""
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {
        name: pa.array(list(x) if getattr(x, "ndim", 1) > 1 else x)
        if not isinstance(x, pa.Array)
        else x
        for name, x in columns.items()
    }
    parquet.write_table(pa.table(arrays), path, row_group_size=group_rows, **options)
    return path


def write_json_lines(path, *batches):
    """Writes batches as lines; a batch with the key `policy_batches` has several policies."""
    lines = [
        {"type": "MultiAgentBatch" if "policy_batches" in batch else "SampleBatch", **batch}
        for batch in batches
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_chunks(source, names=None, max_rows=1 << 30):
    """Returns the chunks of all rows, in the order of the units."""
    result = []
    for table, start, stop in source.units:
        position = start
        while position < stop:
            request = ReadRequest(table, position, stop, max_rows, names)
            chunks, next_position = source.read(request)
            assert next_position > position
            position = next_position
            result += chunks
    return result


def read_columns(source, names=None, max_rows=1 << 30):
    """Returns all rows of a source as one dict of arrays."""
    chunks = read_chunks(source, names, max_rows)
    return {
        name: np.concatenate([chunk.columns[name] for chunk in chunks])
        for name in chunks[0].columns
    }
