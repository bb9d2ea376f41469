# SPDX-License-Identifier: Apache-2.0
"""Four ranks on two hosts: network namespaces of this machine with a link between them
whose rate is shaped.  A step lasts as long as its compute or as the link needs for its
bytes at least.  The order of a step asks for more: all parameters cross the link before
or under the forward, all gradients under or after the backward.  Its least time with
a link that never rests follows from the lengths of the tasks."""
import contextlib
import json
import os
import pathlib
import shutil
import statistics

from harness import GPT, OFFLOAD, Absent, gpt_config, sh

ABOUT = "4 ranks on 2 hosts: step against the longer of compute and link"

# mpirun calls this instead of ssh: AGENT HOST COMMAND...
AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


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
    """A run's lines and tasks, and bytes over the link in a step."""
    config = gpt_config(2, 1, OFFLOAD, steps, workers=1, task_log=True)
    before = h.sent()
    t = b.train(config, prefix=h.launch(2))
    return t, (h.sent() - before) / steps


def median_s(t, task, unit):
    return statistics.median(1e-6 * (x["end_us"] - x["begin_us"]) for x in t.tasks
                             if (x["task"], x["unit"]) == (task, unit) and
                             x["step"] >= t.SKIP)


def least_s(t, link):
    """Seconds of a step in its order.  Half of `link` brings the blocks' parameters,
    half sends their gradients, one block after the other; t: the tasks of compute."""
    blocks = range(1, GPT["layers"] + 1)
    one = link / 2 / len(blocks)
    compute = arrived = sent = 0
    for u in blocks:
        arrived += one
        compute = max(compute, arrived) + median_s(t, "forward", u)
    for u in reversed(blocks):
        compute += median_s(t, "backward", u)
        sent = max(sent, compute) + one
    return sent


def run(b):
    steps = 6 if b.quick else 16
    with two_hosts(b.folder) as h:
        t, size = measure(b, h, steps)
        compute = t.step_s
        b.figure("step, link not shaped", compute, "s", better="less",
                 note=f"{size / 1048576:.1f} MiB a step each way")
        for part in (0.25, 0.5, 1.0, 2.0):
            link = part * compute
            rate = size / link
            h.shape(rate)
            shaped, _ = measure(b, h, steps)
            h.unshape()
            again, _ = measure(b, h, steps)  # the machine may have changed
            longer = max(link, (compute + again.step_s) / 2)
            b.figure(f"step / least of its order, link {part:g} x compute",
                     shaped.step_s / least_s(again, link), "ratio", 1.12, "less",
                     note=f"{rate * 8e-6:.0f} Mbit/s")
            b.figure(f"step / longer of compute and link, link {part:g} x compute",
                     shaped.step_s / longer, "ratio", 1.12, "less",
                     note=f"{shaped.summary['comm_hidden_percent']:.0f} % of "
                     f"collectives beside compute; their sum "
                     f"{(link + compute) / longer:.2f}, the order's least "
                     f"{least_s(again, link) / longer:.2f}")
