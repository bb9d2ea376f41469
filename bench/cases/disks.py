# SPDX-License-Identifier: Apache-2.0
"""Two disks against one: loop devices of files here, each held to a rate by the
kernel's control group for block devices (version 1)."""
import contextlib
import os
import pathlib
import shutil
import statistics

from harness import Absent, sh

ABOUT = "two disks against one, at equal and at different rates"
GROUP = pathlib.Path("/sys/fs/cgroup/blkio")
MB = 10 ** 6


class Disk:
    def __init__(self, folder, mib):
        self.place = folder / "mounted"
        self.place.mkdir(parents=True)
        image = folder / "image"
        with open(image, "wb") as f:
            f.truncate(mib << 20)
        self.device = sh("losetup", "--direct-io=on", "-f", "--show", image)
        sh("mkfs.ext4", "-q", "-F", self.device)
        sh("mount", self.device, self.place)
        number = pathlib.Path("/sys/block") / pathlib.Path(self.device).name / "dev"
        self.number = number.read_text().strip()

    def close(self):
        sh("umount", self.place, check=False)
        sh("losetup", "-d", self.device, check=False)


@contextlib.contextmanager
def two_disks(folder, mib):
    if os.geteuid() or not (GROUP / "blkio.throttle.read_bps_device").exists():
        raise Absent("needs root and a control group of version 1 (blkio)")
    group = GROUP / f"izar-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        group.mkdir()
        stack.callback(group.rmdir)
        disks = []
        for i in range(2):
            at = folder / f"disk{i}"
            stack.callback(shutil.rmtree, at, ignore_errors=True)
            try:
                disks.append(Disk(at, mib))
            except RuntimeError as why:
                raise Absent(f"this system makes no disks: {why}") from why
            stack.callback(disks[-1].close)
        yield group, disks


def rate(b, group, folders, rounds):
    """GB/s that our callers write and read at the same time."""
    rows = b.call_json(["sh", "-c", 'echo $$ >"$0"; exec "$@"', group / "cgroup.procs",
                        b.program("bench/bench_nvme"), ",".join(map(str, folders)),
                        192, rounds])
    b.raw += rows
    return statistics.median(r["ours"] for r in rows if r["what"] == "both")


def run(b):
    rounds = 1 if b.quick else 5
    with two_disks(b.folder, 700) as (group, disks):
        for second in (200, 100):
            for disk, mb in zip(disks, (200, second)):
                for way in ("read", "write"):
                    (group / f"blkio.throttle.{way}_bps_device").write_text(
                        f"{disk.number} {mb * MB}")
            one = rate(b, group, [disks[0].place], rounds)
            both = rate(b, group, [d.place for d in disks], rounds)
            b.figure(f"200 and {second} MB/s against 200 MB/s alone, of what could be",
                     both / one / (1 + second / 200), "ratio", 0.9,
                     note=f"{both:.2f} and {one:.2f} GB/s, both ways")
