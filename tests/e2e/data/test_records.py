# SPDX-License-Identifier: Apache-2.0
"""The tool that makes files of records: what it writes, and what it refuses."""
import collections
import os
import pathlib
import struct

import pytest

import run

pytest.importorskip("numpy")
IMAGE = 1 + 3 * 32 * 32
CLICK = 4 * 40


def records(*args):
    return run.call(run.ROOT / "tools/records", *args)


def made(*args):
    r = records(*args)
    assert r.rc == 0, str(r)
    return pathlib.Path(args[1] if args[0] in ("shapes", "clicks")
                        else args[-1]).read_bytes()


def refused(words, *args):
    r = records(*args)
    assert r.rc == 1 and words in r.err, str(r)
    assert not pathlib.Path(args[-1]).exists()
    assert not pathlib.Path(f"{args[-1]}.tmp").exists()


@pytest.mark.parametrize("kind, size", [("shapes", IMAGE), ("clicks", CLICK)])
def test_a_record_is_a_function_of_seed_and_number(kind, size, tmp_path):
    many = made(kind, tmp_path / "a", 50)
    assert len(many) == 50 * size
    assert made(kind, tmp_path / "b", 20) == many[:20 * size]
    (tmp_path / "link").symlink_to("c")  # is followed
    other = made(kind, tmp_path / "link", 50, 2)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "c").is_file()
    assert sum(many[i:i + size] == other[i:i + size]
               for i in range(0, len(many), size)) == 0


def test_shapes_are_of_all_classes_and_bright(tmp_path):
    data = made("shapes", tmp_path / "a", 1000)
    labels = collections.Counter(data[::IMAGE])
    assert sorted(labels) == list(range(10)) and min(labels.values()) > 60
    for i in range(100):
        image = data[i * IMAGE + 1:(i + 1) * IMAGE]
        lit = sum(v > 128 for v in image) / len(image)
        assert 0.02 < lit < 0.75


def test_clicks_follow_a_power_law(tmp_path):
    data = made("clicks", tmp_path / "a", 5000)
    rows = list(struct.iter_unpack("<40i", data))
    assert 0.15 < sum(r[0] for r in rows) / len(rows) < 0.4
    assert set(r[0] for r in rows) == {0, 1}
    last = [r[39] for r in rows]
    assert max(last) > 80000  # of 10^5, and half of all in the first eighth
    assert abs(sum(v < 12500 for v in last) / len(last) - 0.5) < 0.05


def idx(path, dims, data, magic=(0, 0, 8)):
    path.write_bytes(bytes([*magic, len(dims)]) +
                     struct.pack(f">{len(dims)}I", *dims) + data)
    return path


def test_idx_becomes_records(tmp_path):
    images = idx(tmp_path / "i", (2, 2, 3), bytes(range(12)))
    labels = idx(tmp_path / "l", (2,), bytes([7, 9]))
    assert made("idx", images, labels, tmp_path / "out") == bytes(
        [7, 0, 1, 2, 3, 4, 5, 9, 6, 7, 8, 9, 10, 11])


def test_a_wrong_idx_is_named(tmp_path):
    def file(name, *args):
        return idx(tmp_path / name, *args)
    images, labels = file("i", (2, 2, 3), bytes(12)), file("l", (2,), bytes(2))
    for words, *pair in (
            ("another number", images, file("m", (3,), bytes(3))),
            ("ends within its header", labels, labels),
            ("no IDX file", file("n", (20,), bytes(20)), labels),
            ("no IDX file", images, file("g", (2,), bytes(2), (0x1f, 0x8b, 8))),
            ("ends early", file("s", (2, 2, 3), bytes(11)), labels),
            ("impossible", file("z", (2, 0, 3), b""), labels),
            ("No such file", tmp_path / "none", labels)):
        refused(words, "idx", *pair, tmp_path / "out")


def line(label="1", dense="5", category="0000000f"):
    return "\t".join([label, *[dense] * 13, *[category] * 26]) + "\n"


def test_criteo_becomes_records(tmp_path):
    text = tmp_path / "t"
    text.write_text(line() + line("0", "", "") + line("1", "-3", "ffffffff"))
    data = made("criteo", text, tmp_path / "out")
    assert list(struct.iter_unpack("<40i", data)) == [
        (1,) + (5,) * 13 + (15,) * 26, (0,) * 40,
        (1,) + (-3,) * 13 + (-1,) * 26]


@pytest.mark.parametrize("bad", [
    line("2"), line(""), line(dense="x"), line(category="0g"),
    line()[:-10] + "\n", line()[:-1] + "\t00\n", "\n", line(dense="2147483648"),
    line(dense="-9" + "9" * 20), line(category="100000000"), line(category="-1"),
    line()[:-1] + "\0x\n"])
def test_a_wrong_line_is_named(bad, tmp_path):
    text = tmp_path / "t"
    text.write_text(line() + bad + line())
    refused("line 2 is not", "criteo", text, tmp_path / "out")


def test_what_cannot_be_read_or_written_is_named(tmp_path):
    refused("No such file", "shapes", tmp_path / "no/x", "1")
    refused("Is a directory", "criteo", tmp_path, tmp_path / "out")
    (tmp_path / "empty").write_text("")
    refused("no lines", "criteo", tmp_path / "empty", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")  # a device would be lost in the same way
    r = records("shapes", tmp_path / "pipe", "1")
    assert r.rc == 1 and "is no regular file" in r.err and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("args", [
    (), ("shapes",), ("shapes", "x"), ("shapes", "x", "0"),
    ("shapes", "x", "1", "-1"), ("shapes", "x", "1k"), ("cubes", "x", "1"),
    ("idx", "x", "y"), ("shapes", "x", "1", "2", "3")])
def test_a_wrong_command_line_says_how(args, tmp_path):
    r = records(*args)
    assert r.rc == 2 and "usage: records" in r.err
    assert records("--help").out == r.err


def test_a_full_disk_is_told_at_once(tmp_path):
    (tmp_path / "x.tmp").symlink_to("/dev/full")
    r = records("shapes", tmp_path / "x", 10**12)  # of which a disk has room for few
    assert r.rc == 1 and "x: No space left on device" in r.err
