# SPDX-License-Identifier: Apache-2.0
"""configs/slurm.sh under a Slurm of one node, which this file starts where it is
installed: root, and Debian's slurm-wlm."""
import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import pytest

import run
from run import FULL, ROOT

SCRIPT = ROOT / "configs/slurm.sh"
FOREVER = {"run.save": True, "run.inject_delay_us": 5000, "run.steps": 10**6}
CONF = """\
ClusterName=izar
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
# what a busy machine may need
MessageTimeout=60
UnkillableStepTimeout=300
KillWait=200
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def lacking():
    """Why there can be no Slurm here."""
    if os.geteuid():
        return "only root can start slurmd"
    for name in ("slurmctld", "slurmd", "sbatch", "srun"):
        if not shutil.which(name):
            return f"no {name} (Debian's slurm-wlm)"
    if os.cpu_count() < 2:
        return "two ranks need two cores"
    return None


def free_ports(n):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Slurm:
    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.conf = folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self.conf.write_text(CONF.format(
            folder=folder, ports=free_ports(2), cores=os.cpu_count(),
            host=socket.gethostname().partition(".")[0]))

    def start(self):
        for name in ("slurmctld", "slurmd"):
            # they end with this process, however it ends
            self.daemons.append(subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", name, "-D"],
                env=run.environment(self.env), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        end = time.monotonic() + run.TIMEOUT_S
        while self.call("sinfo", "-h", "-o", "%T").out.strip() != "idle":
            logs = "\n".join(x.read_text() for x in self.folder.glob("*.log"))
            assert time.monotonic() < end and \
                not any(d.poll() is not None for d in self.daemons), logs
            time.sleep(0.1)

    def call(self, *line):
        return run.call(*line, env=self.env)

    def left(self):
        """What was started here, by jobs or for them, and is still there."""
        mark, found = f"SLURM_CONF={self.conf}".encode(), []
        for p in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in p.read_bytes().split(b"\0"):
                    found.append(int(p.parent.name))
        return found

    def close(self):
        for d in reversed(self.daemons):
            d.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                d.wait(30)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for d in self.daemons:
            d.wait()
        assert run.all_gone(self.left())


@pytest.fixture(scope="module")
def slurm(workplace):
    reason = lacking()
    if reason:
        pytest.skip(reason)
    folder = workplace / "slurm"
    folder.mkdir()
    s = Slurm(folder)
    try:
        s.start()
        yield s
    finally:
        s.close()


# Ends with a job and with its status; sbatch --wait would look every ten seconds.
WAIT = r"""
id=$(sbatch --parsable "$@") && echo "$id" || exit
while squeue -h -j "$id" | grep -q .; do sleep 0.2; done
exit "$(scontrol show job "$id" | sed -n 's/.*ExitCode=\([0-9]*\):.*/\1/p')"
"""


class Job(run.Run):

    def __init__(self, slurm, place, ranks, settings, output, options=()):
        config = place.config(settings, output)
        self.log = pathlib.Path(f"{config}.log")
        super().__init__(
            ["sh", "-c", WAIT, "sbatch", "--nodes=1", f"--ntasks-per-node={ranks}",
             "--cpus-per-task=1", f"--output={self.log}", *options, str(SCRIPT),
             place.program, str(config), str(output)],
            config, slurm.env)

    @property
    def id(self):
        return self.text(0).strip()

    def finish(self, timeout_s=run.TIMEOUT_S):
        r = super().finish(timeout_s)
        return run.Result(r.rc, self.log.read_text(), r.out + r.err, self.output,
                          r.seconds, self.line)


def test_jobs_go_on_where_the_last_one_ended(slurm, place):
    """One gets the signal that Slurm sends before a time limit, one is cancelled,
    one ends by itself; what they computed is what one run computes."""
    output = place.folder / "chain"
    (output / "checkpoints/step-00000001.tmp").mkdir(parents=True)  # of one that died
    more = {"run.save": True, "zero_optimization.stage": 3}
    stops = []
    for signal_ in (["--signal=USR1"], []):
        job = Job(slurm, place, 2, {**more, **FOREVER}, output)
        job.until_step((stops or [0])[-1] + 2)
        assert slurm.call("scancel", *signal_, job.id).rc == 0
        r = job.finish()
        assert r.summary["reason"] == "interrupted", str(r)
        # srun ends with the job that is cancelled, before its ranks
        assert r.rc == 0 or not signal_, str(r)
        stops.append(r.summary["steps"])
        assert r.saved[-1] == stops[-1], str(r)
    assert stops[0] < stops[1]
    more["run.steps"] = stops[1] + 2
    r = Job(slurm, place, 2, more, output).finish()
    assert r.rc == 0 and r.summary["reason"] == "finished", str(r)
    assert r.numbers == place.good(2, more).numbers


@pytest.mark.skipif(not FULL, reason="Slurm's least time limit is a minute")
def test_the_time_limit_saves(slurm, place):
    """By the signal before it, and by the SIGTERM at the limit itself, which comes
    twice."""
    jobs = [Job(slurm, place, 1, FOREVER, place.folder / name,
                ["--time=1", f"--job-name={name}", *options])
            for name, options in (("warned", ["--signal=USR1@30"]),
                                  ("late", ["--signal=USR1@0"]))]
    warned, late = (job.finish() for job in jobs)
    for r in warned, late:
        assert r.summary["reason"] == "interrupted", str(r)
        assert r.saved == [r.summary["steps"]], str(r)
    assert warned.rc == 0, str(warned)
    assert "DUE TO TIME LIMIT" in late.out, str(late)
