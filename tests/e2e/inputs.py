# SPDX-License-Identifier: Apache-2.0
"""What runs read besides their config: token files, described machines."""
import array
import itertools
import json
import random
import struct
from xml.etree import ElementTree

import run

MAGIC16, MAGIC32 = (20240520, 1), (20240801, 7)
MASK = int.from_bytes(b"mask", "little"), 1
TOKENS = [i * 7 % 256 for i in range(5000)]


def shard(path, tokens, magic=MAGIC16):
    """A token file: a header of 256 integers, then the tokens."""
    kind = "H" if magic == MAGIC16 else "I"
    path.write_bytes(struct.pack("<256i", *magic, len(tokens), *[0] * 253) +
                     array.array(kind, tokens).tobytes())
    return path


def masked(path, learn):
    """A shard, beside which there is now a loss mask."""
    head = struct.pack("<256i", *MASK, len(learn), *[0] * 253)
    path.with_suffix(".mask").write_bytes(head + bytes(learn))
    return path


def pair_texts(pairs, seq):
    """(tokens, mask) of all texts of pairs, of seq tokens each."""
    tokens, mask = [], []
    for prompt, *answers in pairs:
        for a in answers:
            rest = seq - len(prompt) - len(a)
            tokens += [*prompt, *a, *[0] * rest]
            mask += [0] * len(prompt) + [1] * len(a) + [0] * rest
    return tokens, mask


def pairs_shard(path, tokens, mask, text):
    """A shard of pairs whose texts have so many tokens, and its mask unless None."""
    head = struct.pack("<256i", *MAGIC16, len(tokens), text, *[0] * 252)
    path.write_bytes(head + array.array("H", tokens).tobytes())
    return path if mask is None else masked(path, mask)


def some_pairs(n=40, seq=run.MODEL["seq"]):
    rng = random.Random(5)

    def tokens(most):
        return [rng.randrange(256) for _ in range(rng.randrange(1, most))]
    for _ in range(n):
        prompt = tokens(seq // 2)
        yield prompt, *(tokens(seq - len(prompt) + 1) for _ in range(2))


def described(place):
    """This machine, as tools/plan --this-machine asks for it."""
    path = place.folder / "machine.json"
    r = run.call(run.built("tools/calibrate"), "--describe", path, place.folder)
    assert r.rc == 0, str(r)
    return path, json.loads(path.read_text())


def topology(path, packages, cores, allowed=None):
    """hwloc's description of a host with a GPU of the stand-in near each
    package, of whose cores a rank may use those allowed, or all."""
    number, every = itertools.count(1), range(packages * cores)

    def mask(indices):
        return hex(sum(1 << i for i in indices))

    def add(parent, kind, index=None, cpus=(), nodes=(), **more):
        if index is not None:
            more |= {"os_index": str(index)}
            for head in ("", "complete_"):
                more |= {f"{head}cpuset": mask(cpus), f"{head}nodeset": mask(nodes)}
        return ElementTree.SubElement(parent, "object", {
            "type": kind, "gp_index": str(next(number)), **more})

    top = ElementTree.Element("topology", version="2.0")
    machine = add(top, "Machine", 0, every, range(packages), allowed_cpuset=mask(
        allowed or every), allowed_nodeset=mask(range(packages)))
    for p in range(packages):
        mine, bus = range(p * cores, (p + 1) * cores), f"{p + 1:02x}"
        package = add(machine, "Package", p, mine, [p])
        add(package, "NUMANode", p, mine, [p], local_memory="1073741824")
        for i in mine:
            add(add(package, "Core", i, [i], [p]), "PU", i, [i], [p])
        bridge = add(package, "Bridge", bridge_type="0-1", depth="0",
                     bridge_pci=f"0000:[{bus}-{bus}]")
        add(bridge, "PCIDev", pci_busid=f"0000:{bus}:00.0", pci_link_speed="0",
            pci_type="0302 [10de:2330] [10de:0000] a1")
    path.write_text('<?xml version="1.0" encoding="UTF-8"?>\n'
                    '<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n' +
                    ElementTree.tostring(top, encoding="unicode"))
    return str(path)
