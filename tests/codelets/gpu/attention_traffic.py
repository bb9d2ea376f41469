#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the loops of attention's backward read and write in shared memory for
what they give the tensor cores, counted in the code that nvcc generated:
attention_traffic.py CUOBJDUMP OBJECT.  A row: columns of a head; what a kernel
holds of the rows, as its template says.  Counts, no timing."""
import re
import subprocess
import sys

# Clocks of a multiprocessor for an instruction of a warp: shared memory moves
# 128 bytes a clock, tensor cores of 8.0 take a 16x8x16 product in two.
CLOCKS = {'HMMA': 2, 'LDSM': 4, 'LDS.128': 4, 'LDS.64': 2, 'LDS': 1,
          'STS.128': 4}


def functions(sass):
    """(capability, name, [(address, predicate, instruction)])"""
    capability = None
    for part in re.split(r'(?=\bcode for sm_|\bFunction : )', sass):
        if m := re.match(r'code for sm_(\d+)', part):
            capability = int(m[1])
        if m := re.match(r'Function : (\S+)', part):
            code = re.findall(r'/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([^;]*);', part)
            yield capability, m[1], [(int(a, 16), p, i) for a, p, i in code]


def loop_of(code):
    """The shortest loop that has all the products that any has."""
    def products(body):
        return sum('HMMA' in i for _, _, i in body)
    loops = []
    for address, _, instruction in code:
        m = re.match(r'BRA.*\b0x([0-9a-f]+)', instruction)
        if m and int(m[1], 16) <= address:
            loops.append([c for c in code if int(m[1], 16) <= c[0] <= address])
    return max(loops, key=lambda b: (products(b), -len(b)))


def count(body):
    n = dict.fromkeys(CLOCKS, 0)
    for _, predicate, instruction in body:
        words = instruction.split()[0].split('.')
        if predicate == '@!PT' or words[0] not in ('HMMA', 'LDSM', 'LDS', 'STS'):
            continue
        wide = [w for w in words[1:] if w in ('64', '128')]
        name = '.'.join(words[:1] + wide)
        if words[0] == 'LDSM':
            assert words[-1] == '4', instruction
        n[name] += 1  # a KeyError: an instruction whose clocks are not known
    return n


def main(cuobjdump, path):
    def dump(option):
        return subprocess.run([cuobjdump, option, path], check=True,
                              capture_output=True, text=True).stdout
    wrong, rows, use = [], 0, {}
    print(f'{"kernel":>28} {"reg":>4} {"HMMA":>5} {"LDSM":>5} {"handed":>6}'
          f' {"tensor clocks":>14} {"LDSM clocks":>12} {"all shared":>11}')
    for part in re.split(r'(?=Fatbin|arch = )', dump('-res-usage')):
        arch = re.search(r'arch = sm_(\d+)', part)
        for f, r in re.findall(r'Function (\S+):\s+REG:(\d+)', part):
            use[int(arch[1]), f] = int(r)
    for capability, name, code in functions(dump('-sass')):
        m = re.match(r'_Z\d+(key_grads|query_grads)IL8iz_dtype(\d)ELi(\d+)ELi(\d)E', name)
        if not m:
            wrong.append(f'{name}: an unknown kernel')
            continue
        loop = loop_of(code)
        n, spilled = count(loop), [i for *_, i in loop if re.match('LDL|STL', i)]
        # A pair of warps: one writes what the other one reads.
        pair = n['STS.128'] > 0
        tensor, moved = n['HMMA'] * CLOCKS['HMMA'], n['LDSM'] * CLOCKS['LDSM']
        rest = sum(n[k] * CLOCKS[k] for k in n if k not in ('HMMA', 'LDSM'))
        shared = moved + (rest // 2 if pair else rest)
        title = f'{m[1]} {m[3]} of {m[4]} at {capability / 10}'
        print(f'{title:>28} {use[capability, name]:4} {n["HMMA"]:5} {n["LDSM"]:5} {n["STS.128"]:6}'
              f' {tensor:14} {moved:12} {shared:11}')
        rows += 1
        if spilled:
            wrong.append(f'{title}: {len(spilled)} times registers are spilled')
        if int(m[3]) <= 128 and moved > tensor:
            wrong.append(f'{title}: shared memory is busy longer than tensor cores')
    if not rows:
        wrong.append('no kernel found')
    for line in wrong:
        print(line)
    return bool(wrong)


sys.exit(main(*sys.argv[1:]))
