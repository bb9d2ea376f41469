# SPDX-License-Identifier: Apache-2.0
"""Four ranks on two hosts: network namespaces of this machine with a link between them
whose rate is shaped.  As long as compute lasts longer than the link needs for a step's
bytes, the step should last as long as compute."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess

from harness import OFFLOAD, Absent, gpt_config

ABOUT = "4 ranks on 2 hosts: step against the longer of compute and link"

# mpirun calls this instead of ssh: AGENT HOST COMMAND...
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def sh(*argv, check=True):
    p = subprocess.run([str(x) for x in argv], capture_output=True, text=True,
                       check=False)
    if check and p.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {p.stderr.strip()}")
    return p.stdout


class Hosts:
    """Two hosts and a link; what it makes in the system is removed at the end."""

    def __init__(self, folder):
        tag = f"{os.getpid() % 100000}"
        self.names = [f"iza{tag}", f"izb{tag}"]
        self.link = [f"vza{tag}", f"vzb{tag}"]
        self.ip = ["10.77.0.1", "10.77.0.2"]
        self.agent = folder / "agent"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def open(self):
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{ip} {name}\n" for ip, name in zip(self.ip, self.names))
        for name in self.names:
            etc = pathlib.Path("/etc/netns") / name
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(hosts)
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", self.link[0], "type", "veth", "peer", "name",
           self.link[1])
        for name, link, ip in zip(self.names, self.link, self.ip):
            sh("ip", "link", "set", link, "netns", name)
            sh("ip", "-n", name, "addr", "add", ip + "/24", "dev", link)
            sh("ip", "-n", name, "link", "set", link, "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")

    def close(self):
        for name, link in zip(self.names, self.link):
            sh("ip", "-n", name, "link", "del", link, check=False)
            sh("ip", "netns", "del", name, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def shape(self, bytes_per_s):
        for name, link in zip(self.names, self.link):
            sh("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf",
               "rate", f"{int(bytes_per_s * 8)}bit", "burst",
               max(65536 * 4, int(bytes_per_s / 250)), "latency", "200ms")

    def unshape(self):
        for name, link in zip(self.names, self.link):
            sh("tc", "-n", name, "qdisc", "del", "dev", link, "root", check=False)

    def sent(self):
        """Bytes over the link so far, in the direction that had more."""
        out = []
        for name, link in zip(self.names, self.link):
            info = json.loads(sh("ip", "-n", name, "-s", "-j", "link", "show",
                                 link))
            out.append(info[0]["stats64"]["tx"]["bytes"])
        return max(out)

    def launch(self, per_host):
        """What starts 2 * per_host ranks; the program follows."""
        mpirun = ["mpirun", "-np", str(2 * per_host), "--host",
                  ",".join(f"{n}:{per_host}" for n in self.names),
                  "--bind-to", "none", "--mca", "plm_rsh_agent", str(self.agent),
                  "--mca", "btl", "tcp,self,vader",
                  "--mca", "btl_tcp_if_include", "10.77.0.0/24",
                  "--mca", "oob_tcp_if_include", "10.77.0.0/24"]
        for key in ("OMPI_ALLOW_RUN_AS_ROOT", "STARPU_HOME", "IZ_PLAIN"):
            mpirun += ["-x", key]
        name = self.names[0]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
                f'hostname {name}; exec "$@"', "sh", *mpirun]


@contextlib.contextmanager
def two_hosts(folder):
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise Absent("needs root and iproute2 (ip, tc)")
    h = Hosts(folder)
    try:
        try:
            h.open()
        except RuntimeError as why:
            raise Absent(f"this system makes no hosts: {why}") from why
        yield h
    finally:
        h.close()


def measure(b, h, steps):
    """Seconds of a step and bytes over the link in one."""
    config = gpt_config(2, 1, OFFLOAD, steps, workers=1)
    before = h.sent()
    t = b.train(config, prefix=h.launch(2))
    hidden = t.summary["comm_hidden_percent"]
    return t.step_s, (h.sent() - before) / steps, hidden


def run(b):
    steps = 6 if b.quick else 16
    with two_hosts(b.folder) as h:
        compute, size, _ = measure(b, h, steps)
        b.figure("step, link not shaped", compute, "s", better="less",
                 note=f"{size / 1048576:.1f} MiB a step each way")
        for part in (0.25, 0.5, 1.0, 2.0):
            rate = size / (part * compute)
            h.shape(rate)
            shaped, _, hidden = measure(b, h, steps)
            h.unshape()
            link = part * compute
            again, _, _ = measure(b, h, steps)  # the machine may have changed
            long = max(link, (compute + again) / 2)
            b.figure(f"step / longer of compute and link, link {part:g} x compute",
                     shaped / long, "ratio", 1.15, "less",
                     note=f"{rate * 8e-6:.0f} Mbit/s, {hidden:.0f} % of "
                     f"collectives beside compute; their sum "
                     f"{(link + compute) / long:.2f}")
