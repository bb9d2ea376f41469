# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's tools see: accesses outside memory in a tiny run, and how long every kernel
of one step of the 7B takes."""
import glob
import json
import re
import shutil

from checking import training
from checking.small import TABLE, command
from checking.work import Job, harness

SMALL_REFERENCE_GEMM = {"IZ_REFERENCE_GEMM": "256"}


def tool(name):
    """Where it is, or None."""
    found = [f for pattern in (f"/usr/local/cuda*/bin/{name}", f"/opt/nvidia/*/*/{name}",
                               f"/usr/local/cuda*/{name}/{name}")
             for f in sorted(glob.glob(pattern))]
    return shutil.which(name) or (found[-1] if found else None)


def memcheck(c, name="memcheck", row=TABLE["gpt2 own attention"]):
    """"Not ready" of an event is an answer; the program looks at all other errors itself."""
    job = command(c, row._replace(name=name, more={**row.more, "run.steps": 2}), "cuda")
    line = [tool("compute-sanitizer"), "--tool", "memcheck", "--report-api-errors", "no",
            "--error-exitcode", "9", *job.line]
    return Job(name, line, 90, SMALL_REFERENCE_GEMM)


def memcheck_of_experts(c):
    return memcheck(c, "memcheck of experts", TABLE["moe gpt-oss"])


def kernels(c):
    """Two layers of the 7B, one step."""
    row = next(r for r in training.FIRST if r.name == "7B as shipped")
    path = c.folder / "kernels.json"
    path.write_text(json.dumps(training.config_of(c, row)))
    changes = {**training.settings_of(c, row), "model.layers": 2, "run.steps": 1,
               "run.task_log": False}
    line = [tool("ncu"), "--metrics", "gpu__time_duration.sum", "--csv", "--clock-control",
            "none", "--log-file", c.out / "kernels.csv", c.programs["gpt2"], path,
            *harness.settings(changes)]
    return Job("kernels", line, 120, SMALL_REFERENCE_GEMM)


def op_times(c):
    """Every op against copies and products."""
    return Job("times of ops", [c.programs["bench_ops"], "--out", c.out / "ops.json",
                                *(["--tiny"] if c.o.tiny else [])], 120)


# What it needs of NVIDIA's tools, and its job.
CASES = {"memcheck": ("compute-sanitizer", memcheck),
         "memcheck of experts": ("compute-sanitizer", memcheck_of_experts),
         "kernels": ("ncu", kernels), "times of ops": (None, op_times)}


def jobs_of(c, names):
    for name in c.todo("debuggers", names):
        needs, job_of = CASES[name]
        if needs and not tool(needs):
            c.add("debuggers", name, "skipped", f"no {needs} on this machine")
        else:
            yield job_of(c)


def add(c, job, status, text, seconds):
    result, log = c.outcome(status, job.limit_s), c.out / "kernels.csv"
    said = text
    if job.name == "kernels" and log.is_file():
        said += log.read_text(errors="replace")
    cannot = re.search(r".*(Device not supported|LibraryNotLoaded|ERR_NVGPUCTRPERM).*", said)
    c.add("debuggers", job.name, "skipped" if cannot else result, f"{seconds:5.1f} s  "
          + " ".join(re.findall(r"ERROR SUMMARY.*", text)) + (cannot or [""])[0], seconds=seconds,
          tail=text[-3000:])


def beside(c):
    """What tells no times, beside each other."""
    rows = {r.name: r for r in training.BESIDE}
    jobs = [training.job_of(c, rows[n]) for n in c.todo("training", rows)]
    jobs += jobs_of(c, ["memcheck", "memcheck of experts"])
    for ended in c.run(jobs, len(jobs)):
        if ended[0].name in rows:
            training.add(c, "training", rows[ended[0].name], *ended)
        else:
            add(c, *ended)


def kernel_times(c):
    """Those of the GPU; meanwhile the host compiles what a peer would wait for."""
    jobs = [*jobs_of(c, ["kernels"]), *training.adam_job(c)]
    for ended in c.run(jobs, len(jobs)):
        if ended[0].name in CASES:
            add(c, *ended)


def last(c):
    for ended in c.run(jobs_of(c, ["times of ops"])):
        add(c, *ended)
