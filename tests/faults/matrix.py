# SPDX-License-Identifier: Apache-2.0
"""Every test against every fault: the table matrix.tsv.xz, and what covers it.

A row is a case of cmocka or pytest, or a whole program, whose case is "*": it fails
where the program does without a failed case.  A column is a fault:
  F  it fails      .  it passes or is skipped      ?  it did not come to an end
  -  it does not come where the fault is            (a blank) was not run yet
A first run of all tests, with a mark in each function that has a fault, gives the
seconds of every case and tells which faults a program, or a case of pytest, comes to;
what a fixture of a module starts counts for all cases of its file.  Of a fault outside
of functions of C all count as coming to it.  What fails with the marks, as tests of the
sources themselves do, is left out.  The faults that cost the least come first, several
at once: most cases see none of them."""
import difflib
import hashlib
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
import typing

import planting
from planting import ROOT, TREE, WORK, Trouble, say

sys.path.insert(0, str(ROOT / "tests"))
import tally  # noqa: E402

FILE = planting.HERE / "matrix.tsv.xz"
WHOLE = "*"
# As tools/check has them: other suites of these builds are those of the first.
SUITES = {"build": None, "build-standin": "standin", "build-simgrid": "simgrid"}
INTERRUPTED_S = 60  # for pytest to write what it has seen
IN_ORDER = "tests/docs/"  # whose cases go on from one another: files are run whole
FEW = 4  # cases that several processes of pytest would take longer for
TOGETHER = 6  # faults: with more, too many cases fail


# ---- the tests ----

class Unit(typing.NamedTuple):
    """A test of meson."""
    build: str
    name: str
    line: tuple
    env: tuple
    folder: str

    def command(self, cases=None, enough=None):
        """Where it is one of pytest: of these alone, in this order, until enough of them
        have failed."""
        if "pytest" not in self.line or cases is None:
            return self.line
        rest = [a for a in self.line if not a.startswith("tests/")]
        if len(cases) < FEW:
            rest = [a for a in rest if a not in ("-n", "auto")]
        if enough:
            rest.append(f"--maxfail={enough}")
        names = (node(c) for c in cases if c != WHOLE)
        return [*rest, *dict.fromkeys(n.partition("::")[0] if n.startswith(IN_ORDER) else n
                                      for n in names)]


def node(case):
    """What pytest calls a case that its report has as folder.file::name."""
    file, colons, name = case.partition("::")
    return file.replace(".", "/") + ".py" + colons + name


def is_named(fault, unit, case):
    """Whether the patch says that it is caught by this one."""
    file = node(case).partition("::")[0]
    return any(head.split() == [unit.build, *unit.name.split()] or
               (args.split()[:1] == [file] and head.split()[0] == unit.build)
               for head, _, args in (t.partition(" : ") for t in fault.tests))


def units_of(build, suites):
    """Of these suites, or all."""
    planting.set_up(build)
    tests = json.loads(subprocess.run(
        ["meson", "introspect", "--tests", build], cwd=TREE, check=True,
        capture_output=True, text=True).stdout)
    for t in tests:
        own = {s.partition(":")[2] for s in t["suite"]}
        if SUITES[build] not in (None, *own) or (suites and not own & set(suites)):
            continue
        yield Unit(build, t["name"], tuple(t["cmd"]), tuple(t["env"].items()),
                   t["workdir"] or str(TREE / build))


def run_unit(unit, line, limit_s, **env):
    """{case: (verdict, seconds)}, and how long all took."""
    results = WORK / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    begin = time.monotonic()
    with open(WORK / "log", "a", encoding="utf-8") as log:
        print("\n$", *line, file=log, flush=True)
        p = subprocess.Popen(
            [TREE / "tests/record.sh", *line], cwd=unit.folder, stdout=log,
            stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**planting.environment(unit.build), **dict(unit.env), **env,
                 "IZ_TEST_RESULTS": str(results), "IZ_TEST_TIMEOUT_S": "60",
                 "PYTEST_ADDOPTS": "-p no:cacheprovider"})
        for wait_s, number in ((limit_s, signal.SIGINT),
                               (INTERRUPTED_S, signal.SIGKILL)):
            try:
                p.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, number)
            except BaseException:
                os.killpg(p.pid, signal.SIGKILL)
                raise
        p.wait()
    seconds = time.monotonic() - begin
    found = {}
    for folder in results.iterdir():
        command = (folder / "command").read_text().strip()
        for name, verdict, _, s in tally.verdicts(folder):
            found[WHOLE if name == command else name] = (verdict, s)
    found.setdefault(WHOLE, ("passed", 0))
    return found, seconds


# ---- the table ----

def hash_of(*paths):
    return hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()[:12]


class Table:
    """rows: {(build, unit, case): [seconds, {fault: letter}]}; faults: {name: hash of
    its patch}; tests: hash of all files of tests when the rows were listed."""

    def __init__(self):
        self.rows, self.faults, self.tests = {}, {}, None
        if not FILE.exists():
            return
        head, *lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
        tests, *faults = (x.split("=") for x in head.split("\t"))
        self.tests, self.faults = tests[1], dict(faults)
        for line in lines:
            *key, seconds, letters = line.split("\t")
            self.rows[tuple(key)] = [float(seconds), dict(zip(self.faults, letters))]

    def save(self):
        lines = ["\t".join(f"{n}={h}" for n, h in (("tests", self.tests),
                                                  *self.faults.items()))]
        lines += ["\t".join([*key, f"{s:.3f}",
                             "".join(row.get(f, " ") for f in self.faults)])
                  for key, (s, row) in sorted(self.rows.items())]
        new = FILE.with_name(FILE.name + ".new")
        new.write_bytes(lzma.compress("\n".join(lines).encode() + b"\n", preset=9))
        new.replace(FILE)

    def fit(self, faults):
        """Forgets what was found of other patches."""
        hashes = {f.name: hash_of(f.path) for f in faults}
        kept = {f for f in hashes if self.faults.get(f) == hashes[f]}
        self.faults = hashes
        self.rows = {key: [s, {f: x for f, x in row.items() if f in kept}]
                     for key, (s, row) in self.rows.items()}

    def keep(self, units):
        """Forgets tests that are there no more."""
        there = {(u.build, u.name) for u in units}
        self.rows = {key: x for key, x in self.rows.items() if key[:2] in there}

    def of(self, unit):
        """{case: {fault: letter}}"""
        return {key[2]: row for key, (_, row) in self.rows.items()
                if key[:2] == (unit.build, unit.name)}

    def lacking(self, unit, fault):
        """Its cases that were not run with a fault they come to: those that its patch
        names, then the cheapest first."""
        return sorted((case for case, row in self.of(unit).items()
                       if row.get(fault.name, " ") == " "),
                      key=lambda c: (not is_named(fault, unit, c),
                                     self.rows[unit.build, unit.name, c][0]))

    def caught(self, fault):
        """How many cases have caught it."""
        return sum(row.get(fault.name) == "F" for _, row in self.rows.values())

    def seconds(self, unit, cases):
        """What they take: all cases of a program that is not pytest's."""
        if "pytest" not in unit.line:
            return self.rows[unit.build, unit.name, WHOLE][0]
        return sum(self.rows[unit.build, unit.name, c][0] for c in cases if c != WHOLE)

    def put(self, unit, fault, cases, all_of_it=True):
        of = self.of(unit)
        for case in self.lacking(unit, fault):
            if case not in cases and not all_of_it:
                continue
            verdict = cases.get(case, ("?", 0))[0]
            of[case][fault.name] = {"failed": "F", "?": "?"}.get(verdict, ".")


# ---- which tests come to a fault ----

# Initialised: the emulation of kernels spoils other variables.
MARK = ('    {{ static char fresh = 1; extern void iz_reached(const char *) '
        '__asm__("iz_reached"); if (fresh) {{ fresh = 0; iz_reached("{}"); }} }}\n')


def changed_lines(fault):
    """(file, number of a line) for each place that the patch changes here."""
    planting.apply_patch(fault)
    for name in fault.files:
        before, after = ((at / name).read_text().splitlines() for at in (ROOT, TREE))
        for tag, i, *_ in difflib.SequenceMatcher(None, before, after,
                                                  False).get_opcodes():
            if tag != "equal":
                yield name, i
        shutil.copyfile(ROOT / name, TREE / name)


def function_of(lines, i):
    """The line that opens the function of line i, or None."""
    for k in range(i - 1, -1, -1):
        if lines[k].startswith("}"):
            return None
        if lines[k] == "{\n":
            return k
    return None


def mark(faults):
    """Marks the functions of the copy that have these faults; returns the names of
    faults that lie in none."""
    marks, elsewhere = {}, set()
    for f in faults:
        for name, i in changed_lines(f):
            at = function_of((ROOT / name).read_text().splitlines(True), i)
            if at is None:
                elsewhere.add(f.name)
            else:
                marks.setdefault(name, set()).add((at, f.name))
    for name, places in marks.items():
        lines = (ROOT / name).read_text().splitlines(True)
        for at, fault in places:
            lines[at] += MARK.format(fault)
        lines.append('#include "tests/faults/reached.h"\n')
        (TREE / name).write_text("".join(lines))
    return elsewhere


def targets(unit):
    """A program of tests needs itself, what pytest starts may be anything."""
    own = [os.path.relpath(a, TREE / unit.build) for a in unit.line
           if a.startswith(f"{TREE / unit.build}/")]
    return own if own and "pytest" not in unit.line else ["all"]


def build_for(units):
    for build in sorted({u.build for u in units}):
        wanted = {t for u in units if u.build == build for t in targets(u)}
        if planting.command(["ninja", "-C", build, *sorted(wanted)], build):
            raise Trouble(f"{build} does not compile: see build-faults/log")


def begin(table, units, faults):
    """Runs tests without a fault, and with marks."""
    reached = WORK / "reached"
    elsewhere = mark(faults)
    try:
        build_for(units)
        for u in units:
            reached.unlink(missing_ok=True)
            cases, s = run_unit(u, u.line, planting.LIMIT_S, IZ_REACHED=str(reached))
            bad = sorted(c for c, (verdict, _) in cases.items() if verdict == "failed")
            if bad:
                say("fails without a fault:", u.build, u.name, *bad)
            if WHOLE in bad:  # nor is it tried again
                add(table, u, {WHOLE: ("passed", 0)}, s, faults, lambda *_: False)
                continue
            lines = reached.read_text().splitlines() if reached.exists() else ()
            add(table, u, cases, s, faults, came(lines, elsewhere))
    finally:
        planting.bring_up_to_date()
        table.save()


def came(lines, elsewhere):
    """came(lines, elsewhere)(case, fault): whether it comes to it, by what
    iz_reached has written."""
    seen = set()
    for line in set(lines):
        fault, _, test = line.partition("\t")
        case, _, phase = test.rpartition(" ")
        if phase == "(setup)":
            case = case.partition("::")[0]
        seen |= {(fault, case), (fault, WHOLE)}
    return lambda case, fault: fault in elsewhere or any(
        (fault, x) in seen for x in (WHOLE if case == WHOLE else "", node(case),
                                     node(case).partition("::")[0]))


def add(table, unit, cases, seconds, faults, comes):
    """Rows of the cases that pass; of others there are none any more."""
    good = {c for c, (verdict, _) in cases.items() if verdict == "passed"}
    for case in set(table.of(unit)) - good:
        del table.rows[unit.build, unit.name, case]
    for case in good:
        row = table.rows.setdefault((unit.build, unit.name, case), [0, {}])
        row[0] = seconds if case == WHOLE else cases[case][1]
        for f in faults:
            if row[1].get(f.name, " ") in " -":
                row[1][f.name] = " " if comes(case, f.name) else "-"


# ---- the columns ----

def work(table, units, fault):
    """[(seconds, program, its cases that are to be run)]: with those that its patch names,
    then cheapest first."""
    todo = [(u, table.lacking(u, fault)) for u in units]
    return sorted(((table.seconds(u, cases), u, cases) for u, cases in todo if cases),
                  key=lambda x: (not is_named(fault, x[1], x[2][0]), x[0]))


def column(table, units, fault, enough):
    """Until enough cases have caught it, if that is a number."""
    todo = work(table, units, fault)
    if not todo or enough and table.caught(fault) >= enough:
        return
    begun = time.monotonic()
    try:
        planting.apply_patch(fault)
        for s, u, cases in todo:
            build_for([u])
            left = enough and enough - table.caught(fault)
            found, _ = run_unit(u, u.command(cases, left), 60 + 3 * s)
            whole = not left or sum(v == "failed" for v, _ in found.values()) < left
            table.put(u, fault, found, whole)
            if not whole:
                break
    except Trouble as trouble:
        say(fault.name, "--", trouble)
    finally:
        planting.bring_up_to_date()
        table.save()
    say(f"{fault.name}: {len(todo)} programs in {time.monotonic() - begun:.0f} s, "
        f"{table.caught(fault)} cases fail")


def together(table, units, faults):
    """Plants them at once: a case of pytest that passes passes with each, unless two of
    them hide each other.  Returns whether most of each program's cases pass."""
    planted, begun, most = [], time.monotonic(), True
    try:
        for f in faults:
            try:
                planting.apply_patch(f)
                planted.append(f)
            except Trouble:  # another one lies there
                pass
        for u in (u for u in units if "pytest" in u.line):
            cases = sorted({c for f in planted for c in table.lacking(u, f)},
                           key=lambda c: table.rows[u.build, u.name, c][0])
            if not cases:
                continue
            build_for([u])
            bad = 10 + len(cases) // 5
            found, _ = run_unit(u, u.command(cases, bad),
                                60 + 3 * table.seconds(u, cases))
            good = {c: x for c, x in found.items() if x[0] not in ("failed", "?")}
            for f in planted:
                table.put(u, f, good, all_of_it=False)
            most &= len(found) - len(good) < bad
    except Trouble as trouble:
        say("together:", trouble)
    finally:
        planting.bring_up_to_date()
        table.save()
    say("together" if most else "not together", f"in {time.monotonic() - begun:.0f} s:",
        *(f.name for f in planted))
    return most


def settle(table, units, faults, enough):
    """Halves them until most cases pass with the rest; what fails then is run with each."""
    if len(faults) > 1 and not enough and not together(table, units, faults):
        half = len(faults) // 2
        settle(table, units, faults[:half], enough)
        settle(table, units, faults[half:], enough)
    else:
        for f in faults:
            column(table, units, f, enough)


def run(everything, faults, suites, enough):
    """everything: all faults that there are; of these some, and tests of some suites,
    are run; enough: see column."""
    table = Table()
    table.fit(everything)
    units = [u for build in planting.STARPU for u in units_of(build, suites)]
    if not suites:
        table.keep(units)
    tests = hash_of(*(ROOT / n for n in planting.sources()
                      if n.startswith("tests/") and not n.startswith("tests/faults/")))
    known = {key[:2] for key, (_, row) in table.rows.items()
             if table.tests == tests and all(f.name in row for f in faults)}
    fresh = [u for u in units if (u.build, u.name) not in known]
    if fresh:
        say(f"without a fault: {len(fresh)} programs")
        begin(table, fresh, faults)
    if not suites:
        table.tests = tests
    sound = [u for u in units if (u.build, u.name, WHOLE) in table.rows]
    order = sorted((f for f in faults if work(table, sound, f)),
                   key=lambda f: sum(s for s, *_ in work(table, sound, f)))
    for i in range(0, len(order), TOGETHER):
        settle(table, sound, order[i:i + TOGETHER], enough)


# ---- what the table says ----

def cover(table):
    """Greedy: again and again the case that catches most new faults by its seconds."""
    caught = {key: {f for f, x in row.items() if x == "F"}
              for key, (_, row) in table.rows.items()}
    cost = {key: max(s, 0.01) for key, (s, _) in table.rows.items()}
    left, taken = set().union(*caught.values()), []
    while left:
        best = max(sorted(caught), key=lambda k: len(caught[k] & left) / cost[k])
        taken.append((best, caught[best] & left))
        left -= caught[best]
    return caught, cost, taken


def print_cover():
    table = Table()
    if not table.rows:
        raise Trouble(f"there is no {FILE.name} yet: see --matrix")
    caught, cost, taken = cover(table)
    for key, new in taken:
        print(f"{cost[key]:8.2f} s  {' '.join(key)}: "
              f"{' '.join(sorted(f.partition('-')[0] for f in new))}")
    by = {f: [k for k in caught if f in caught[k]] for f in table.faults}
    print(f"cover: {len(taken)} tests, {sum(cost[k] for k, _ in taken):.0f} s of "
          f"{sum(s for (*_, c), (s, _) in table.rows.items() if c == WHOLE):.0f} s")
    for f in table.faults:
        cases = [k for k in by[f] if k[2] != WHOLE] or by[f]
        if len(cases) == 1:
            print(f"caught by one alone: {f}: {' '.join(cases[0])}")
    left = {f for f in table.faults if not by[f]}
    blank = {f for f in left
             if any(row.get(f, " ") == " " for _, row in table.rows.values())}
    print("caught by none:", *sorted(left - blank))
    print("not caught yet, with tests that were not run:", *sorted(blank))
