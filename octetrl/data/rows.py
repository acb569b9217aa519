"""Read rows of files in several formats: objects, each with its place in the file for messages.

    *.parquet       needs the extra `parquet`                      chat.parquet, row 17
    a folder        saved by `datasets`, or loadable by it         folder[train], row 17
    owner/name      a data set of the Hugging Face hub             owner/name[train], row 17
    anything else   JSONL: one object per line                     chat.jsonl:17

`hf:owner/name` is the hub's also where there is a folder of this name, and `owner/name@REVISION` is another revision.
Folder and hub need the extra `datasets`. Rows count from 1. A file is read and checked completely before the run
starts, so an error in line 90,000 does not stop a running run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from octetrl.system.errors import UserError
from octetrl.system.json_file import kind_of, parse_json, read_text
from octetrl.system.names import DATASET_PREFIX, HubName, hub_dataset


class Row(NamedTuple):
    number: int  # from 1; in a JSONL file the number of the line
    where: str  # place for messages
    record: dict[str, Any]
    is_padded: bool = False  # whether it and its objects may have keys of other rows, with null


def read_rows(path: str | Path, *, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Read the rows at `path`, in order.

    split, subset: only for `datasets`. subset None: the default subset.
    Raises UserError for a source that is missing, empty or unreadable, and for a line that is not an object.
    """
    path = str(path)
    hub = hub_dataset(path)
    if hub is not None or Path(path).is_dir():
        rows = _hugging_face_rows(path, hub, split, subset)
    elif path.endswith(".parquet"):
        rows = _parquet_rows(path)
    else:
        rows = (Row(number, f"{path}:{number}", record) for number, record in read_jsonl(path))
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path}: there are no rows; it needs one object per row")
    yield first
    yield from rows


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read (line number from 1, object) for each line that is not empty.

    Raises UserError for a file that is missing, empty or not UTF-8, and for a line that is not a JSON object.
    """
    text = read_text(Path(path), "give the path of a JSONL file in UTF-8", encoding="utf-8-sig")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(
            f'{path}: the file is empty; it needs one object per line, such as {{"prompt": ..., "answer": ...}}'
        )
    for number, line in lines:
        record = parse_json(line, f"{path}:{number}", "each line is one JSON object")
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: {kind_of(record)}, not an object; each line is one JSON object")
        yield number, record


def find_value(record: Mapping[str, Any], column: str) -> Any:
    """Return the value of `record` at `column`, which is a key or several keys joined by dots; KeyError without one."""
    if column in record:
        return record[column]
    value: Any = record
    for key in column.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[key]
    return value


def required_text(record: Mapping[str, Any], key: str, where: str) -> str:
    """Read `record[key]`, a string that is not blank. Raises UserError that begins with `where`."""
    if key not in record:
        misspelt = get_close_matches(key, record, n=1)
        hint = f"'{misspelt[0]}' is not read; did you mean '{key}'?" if misspelt else ""
        raise UserError(f"{where}: no '{key}'; {hint or 'the line has ' + (', '.join(record) or 'no keys')}")
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: '{key}' is {kind_of(value)}; it must be a string that is not empty")
    return value


def _parquet_rows(path: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: Parquet needs pyarrow, which is not installed; pip install 'octetrl[parquet]'"
        ) from None
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        records = (record for batch in batches for record in _as_written(batch.to_pylist(), batch.schema))
        yield from (
            Row(number, f"{path}, row {number}", record, is_padded=True)
            for number, record in enumerate(records, start=1)
        )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a Parquet file") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not Parquet ({str(error).splitlines()[0][:120]}); write the file again") from error
    except (ValueError, OverflowError, KeyError) as error:  # text that is not UTF-8, a date or time zone that is none
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{path}: Python can't hold a value of a column ({reason}); leave the column out, or correct it"
        ) from error


def _hugging_face_rows(path: str, hub: HubName | None, split: str, subset: str | None) -> Iterator[Row]:
    path = path.removeprefix(DATASET_PREFIX)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{path}: needs Hugging Face datasets, which is not installed; pip install 'octetrl[datasets]'"
        ) from None
    folder = Path(path)
    try:
        if hub is not None:
            loaded = datasets.load_dataset(hub.name, name=subset, split=split, revision=hub.revision)
        elif any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise UserError(f"{path}: no split '{split}'; it has {', '.join(loaded)}")
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, name=subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        remedy = "" if hub is None else f"; without a network {_by_hand(hub)}"
        raise UserError(f"{path}: datasets can't load it ({reason}); check path, split and subset{remedy}") from error
    for number, record in enumerate(_as_written(loaded, _schema_of(loaded)), start=1):
        yield Row(number, f"{path}[{split}], row {number}", record, is_padded=True)


def _by_hand(hub: HubName) -> str:
    at = f" --revision {hub.revision}" if hub.revision else ""
    folder = f"data/{hub.name.rpartition('/')[2]}"
    return f"bring it from another machine (hf download {hub.name}{at} --repo-type dataset --local-dir {folder})"


def without_padding(value: Any) -> Any:
    """Remove keys with the value null from all objects of a padded row.

    All objects of a column have one set of keys: the format adds those of the other rows with null, and nothing in the
    file tells them from a null of the row's own. Only for shapes in which a key with null means the same as no key, as
    messages and the schemas of tools."""
    if isinstance(value, list):
        return [without_padding(each) for each in value]
    if isinstance(value, dict):
        return {key: without_padding(each) for key, each in value.items() if each is not None}
    return value


def _schema_of(loaded: Any) -> Any:
    features = getattr(loaded, "features", None)  # a data set that is read as it streams may have none
    return None if features is None else features.arrow_schema


def _as_written(records: Iterable[Any], schema: Any) -> Iterable[Any]:
    """`records` with the shortest digits of 32-bit and 16-bit floats: 0.1 and not 0.10000000149011612.

    schema: pyarrow's, of the records; None: not known."""
    if not re.search(r"\b(?:half)?float\b", str(schema)):
        return records
    return ({field.name: _shortest(record[field.name], field.type) for field in schema} for record in records)


def _shortest(value: Any, kind: Any) -> Any:
    import pyarrow

    types = pyarrow.types
    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {field.name: _shortest(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_shortest(each, kind.value_type) for each in value]
    return value
