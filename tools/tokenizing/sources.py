# SPDX-License-Identifier: Apache-2.0
"""What a file of the input is, by its first bytes, and as text or lines of JSON: packed
files, arrays of JSON and tables become such lines in a file without a name."""
import bz2
import contextlib
import errno
import gzip
import json
import lzma
import mmap
import pathlib
import shutil
import tempfile
import typing

from tokenizing import records
from tokenizing.shards import Refused, map_file
from tokenizing.tokens import package

BOM = b"\xef\xbb\xbf"
PACKED = {b"\x1f\x8b": ("gzip", gzip), b"BZh": ("bzip2", bz2), b"\xfd7zXZ\0": ("xz", lzma),
          b"]\0\0": ("lzma", lzma)}
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
REFUSED = {b"PK\3\4": "a zip archive", b"\x28\xb5\x2f\xfd": "packed by zstd",
           b"7z\xbc\xaf\x27\x1c": "a 7z archive", b"Rar!\x1a\7": "a RAR archive",
           b"\4\x22\x4d\x18": "packed by lz4", b"LZIP\1": "packed by lzip",
           b"\x1f\x9d": "packed by compress", b"\x93NUMPY": "an array of NumPy",
           b"Obj\1": "a file of Avro", b"%PDF-": "a PDF", b"SQLite format 3\0": "a database of SQLite",
           b"\x89HDF": "HDF5", b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HEAD = 1 << 20  # bytes in which a first record is looked for at first


class File(typing.NamedTuple):
    path: str
    data: object
    start: int  # behind a byte order mark
    how: str  # what it is
    json: bool  # a document per line
    unit: str  # what `where` counts


def magic(data, table):
    return next((v for k, v in table.items() if data[:len(k)] == k), None)


class Scratch:
    """Lines that are written to a file without a name beside the output."""

    def __init__(self, folder, path):
        self.path, self.file = path, tempfile.TemporaryFile(dir=folder)

    def mapped(self):
        self.file.flush()
        if self.file.tell() == 0:
            raise Refused(f"{self.path} has nothing in it")
        with self.file:
            return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)


@contextlib.contextmanager
def unpacking(path):
    """Tells what is wrong with a file with its name; the output's disk may be full too."""
    try:
        yield
    except Refused:
        raise
    except Exception as e:
        if getattr(e, "errno", None) in FULL:
            raise
        raise Refused(f"{path}: {e}") from e


# ---- JSON ----

def values(path, text):
    """The texts of JSON values one after the other, or in an array."""
    decode, at = json.JSONDecoder().raw_decode, 0
    inside = text.lstrip()[:1] == "["
    if inside:
        at = text.index("[") + 1
    while True:
        while text[at:at + 1] and text[at] in " \t\r\n,":
            at += 1
        if inside and text[at:at + 1] == "]":
            inside, at = False, at + 1
            continue
        if not inside and not text[at:at + 1]:
            return
        try:
            end = decode(text, at)[1]
        except (ValueError, RecursionError) as e:
            raise Refused(f"{path}: is not JSON: {e}") from e
        yield text[at:end]
        at = end


def is_cut(text, fault):
    """Whether JSON is no JSON because it ends."""
    return isinstance(fault, json.JSONDecodeError) and (
        fault.msg.startswith("Unterminated") or fault.pos > len(text) - len("false"))


def has_record(data, size=HEAD):
    """Whether a text begins with a record, or an array of them; and whether the
    record is a line."""
    head = data[:size].decode("utf-8-sig", "ignore").lstrip()
    start = len(head) - len(head.lstrip("[ \t\r\n"))
    try:
        found, end = json.JSONDecoder().raw_decode(head, start)
        rest = head[end:].partition("\n")[0].strip()
        line = start == 0 and "\n" not in head[:end] and not rest
        return isinstance(found, dict) and records.form_of(found) is not None, line
    except (ValueError, RecursionError) as e:
        if size < len(data) and head[start:start + 1] == "{" and is_cut(head, e):
            return has_record(data, 2 * size)
        return False, False


def open_json(path, data, how, folder):
    scratch = Scratch(folder, path)
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise Refused(f"{path}: is not JSON: {e}") from e
    for one in values(path, text):
        scratch.file.write(one.replace("\n", " ").replace("\r", " ").encode() + b"\n")
    return File(path, scratch.mapped(), 0, how + "JSON", True, "record")


def open_text(path, name, data, how, folder):
    """A name says JSON, or a record at the beginning does."""
    start = len(BOM) if data[:len(BOM)] == BOM else 0
    ending = pathlib.Path(name).suffix.lower()
    record, line = has_record(data)
    if ending in (".csv", ".tsv"):
        raise Refused(f"{path} is a table of text: make lines of JSON or parquet of it")
    if ending in (".jsonl", ".ndjson") or record and line:
        return File(path, data, start, how + "JSON lines", True, "line")
    if ending == ".json" or record:
        return open_json(path, data, how, folder)
    return File(path, data, start, how + "text", False, "document")


# ---- tables ----

def without_none(value):
    """A table has all members in all rows; a record has what is not null."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value]
    return value


def plain(value):
    """What JSON has no form for: dates and decimals as text."""
    if isinstance(value, bytes):
        raise TypeError("has bytes where a record has text: make strings of that column")
    return str(value)


def batches(path, kind):
    """Those of a file, of the columns that a record may have."""
    arrow = package("pyarrow", f"{path} is {kind}, which")

    def some(names):
        found = [n for n in names if n in records.KEYS]
        if not found:
            raise Refused(f"{path} has the columns {', '.join(names)}, of which none is "
                          "of a record")
        return found

    if kind == "parquet":
        table = package("pyarrow.parquet").ParquetFile(path)
        yield from table.iter_batches(columns=some(table.schema_arrow.names))
        return
    with arrow.memory_map(path) as source:
        try:
            table = arrow.ipc.open_file(source)
            every = (table.get_batch(i) for i in range(table.num_record_batches))
        except arrow.ArrowInvalid:
            source.seek(0)
            table = every = arrow.ipc.open_stream(source)
        for batch in every:
            yield batch.select(some(table.schema.names))


def open_table(path, kind, folder):
    scratch = Scratch(folder, path)
    with unpacking(path):
        for batch in batches(path, kind):
            for row in batch.to_pylist():
                line = json.dumps(without_none(row), ensure_ascii=False, default=plain)
                scratch.file.write(line.encode() + b"\n")
    return File(path, scratch.mapped(), 0, kind, True, "record")


def saved_files(folder):
    """Of a data set that was saved with save_to_disk."""
    try:
        if (folder / "dataset_dict.json").exists():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            raise Refused(f"{folder} has the splits {', '.join(splits)}: name one of them, "
                          f"{folder / splits[0]}")
        state = json.loads((folder / "state.json").read_text())
        return [str(folder / f["filename"]) for f in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Refused(f"{folder} is a folder without the state.json of a saved data set: "
                      f"name files ({e})") from e


# ---- all ----

def open_file(path, folder, name=None, data=None, how=""):
    data = map_file(path) if data is None else data
    name = name or path
    bad, packed, table = (magic(data, t) for t in (REFUSED, PACKED, TABLES))
    if data[257:262] == b"ustar":
        bad = "a tar archive"
    if bad:
        raise Refused(f"{path} is {bad}: unpack or convert it")
    if how and (packed or table):
        raise Refused(f"{path} is {table or packed[0]} packed by {how[:-2]}: unpack it")
    if packed:
        scratch = Scratch(folder, path)
        with unpacking(path), packed[1].open(path) as f:
            shutil.copyfileobj(f, scratch.file, 1 << 20)
        return open_file(path, folder, name[:name.rfind(".")], scratch.mapped(),
                         packed[0] + ", ")
    if table:
        return open_table(path, table, folder)
    return open_text(path, name, data, how, folder)


def open_all(paths, folder):
    """Each file of the input as text or lines of JSON."""
    found = []
    for path in paths:
        inner = saved_files(pathlib.Path(path)) if pathlib.Path(path).is_dir() else [path]
        found += [open_file(p, folder) for p in inner]
    return found
