# SPDX-License-Identifier: Apache-2.0
"""What runs read besides their config: token files, described machines."""
import array
import itertools
import json
import random
import struct

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


def pair_texts(pairs, seq, fill=0):
    """(tokens, mask) of all texts of pairs, of seq tokens each."""
    tokens, mask = [], []
    for prompt, *answers in pairs:
        for a in answers:
            rest = seq - len(prompt) - len(a)
            tokens += [*prompt, *a, *[fill] * rest]
            mask += [0] * len(prompt) + [1] * len(a) + [0] * rest
    return tokens, mask


def pairs_shard(path, tokens, mask, text):
    """A shard of pairs whose texts have so many tokens, and its mask unless None."""
    head = struct.pack("<256i", *MAGIC16, len(tokens), text, *[0] * 252)
    path.write_bytes(head + array.array("H", tokens).tobytes())
    if mask is not None:
        head = struct.pack("<256i", *MASK, len(mask), *[0] * 253)
        path.with_suffix(".mask").write_bytes(head + bytes(mask))
    return path


def some_pairs(n=40, seq=run.MODEL["seq"], vocab=256):
    rng = random.Random(5)

    def tokens(most):
        return [rng.randrange(vocab) for _ in range(rng.randrange(1, most))]
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
    def sets(cpus, nodes):
        c, n = (hex(sum(1 << i for i in x)) for x in (cpus, nodes))
        return (f'cpuset="{c}" complete_cpuset="{c}" nodeset="{n}" '
                f'complete_nodeset="{n}"')

    number = itertools.count(2)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>',
             '<!DOCTYPE topology SYSTEM "hwloc2.dtd">',
             '<topology version="2.0">']
    whole = sets(range(packages * cores), range(packages))
    may = sets(allowed or range(packages * cores), range(packages)).replace(
        "complete_", "allowed_").split(" ")
    lines.append(f'<object type="Machine" os_index="0" {whole} {may[1]} '
                 f'{may[3]} gp_index="1">')
    for p in range(packages):
        mine = range(p * cores, (p + 1) * cores)
        lines.append(f'<object type="Package" os_index="{p}" '
                     f'{sets(mine, [p])} gp_index="{next(number)}">')
        lines.append(f'<object type="NUMANode" os_index="{p}" '
                     f'{sets(mine, [p])} gp_index="{next(number)}" '
                     'local_memory="1073741824"/>')
        for i in mine:
            for kind, end in (("Core", ">"), ("PU", "/></object>")):
                lines.append(f'<object type="{kind}" os_index="{i}" '
                             f'{sets([i], [p])} gp_index="{next(number)}"{end}')
        bus = f"{p + 1:02x}"
        lines.append(f'<object type="Bridge" gp_index="{next(number)}" '
                     f'bridge_type="0-1" depth="0" '
                     f'bridge_pci="0000:[{bus}-{bus}]">')
        lines.append(f'<object type="PCIDev" gp_index="{next(number)}" '
                     f'pci_busid="0000:{bus}:00.0" '
                     'pci_type="0302 [10de:2330] [10de:0000] a1" '
                     'pci_link_speed="0"/></object></object>')
    path.write_text("\n".join([*lines, "</object></topology>", ""]))
    return str(path)
