# SPDX-License-Identifier: Apache-2.0
"""tools/setup with stand-ins for what it calls: what it builds where, and what it
says when it cannot."""
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXPIRED = """\
#!/bin/sh
case "$*" in
*indextargets*) echo "Debian|main|http://archive.example/debian" ;;
*update*)
    echo "E: Release file for http://archive.example/InRelease is expired."
    echo "Done."
    exit 100
    ;;
esac
"""
# Of a source package it has the tar file alone.
INCOMPLETE = """\
#!/bin/sh
case "$*" in
*indextargets*) echo "Debian|main|http://archive.example/debian" ;;
*update) ;;
*--tar-only*) cp {} . ;;
*)
    echo "E: Failed to fetch http://archive.example/starpu_1.4.3.dsc  404  Not Found"
    exit 100
    ;;
esac
"""
# A StarPU with CUDA, or none; other packages as they are.
PKG_CONFIG = """\
#!/bin/sh
case "$*" in
*includedir*starpu*) echo "{starpu}" ;;
*starpu*) [ -n "{starpu}" ] && echo 1.4.10 ;;
*) exec {real} "$@" ;;
esac
"""
MESON = """\
#!/bin/sh
[ "$1" = setup ] || { echo 1.0.1; exit; }
echo "meson $*" >>calls
mkdir -p build
touch build/build.ninja
"""
NINJA = """\
#!/bin/sh
echo "ninja $*" >>calls
"""
NVCC = """\
#!/bin/sh
echo "#$ TOP={}" >&2
"""


class Tree:
    def __init__(self, folder, starpu, name="a tree"):
        self.folder, self.bin = folder / name, folder / "bin"
        self.calls = self.folder / "calls"
        shutil.copytree(ROOT / "tools/patches", self.folder / "tools/patches")
        shutil.copy(ROOT / "tools/setup", self.folder / "tools")
        self.bin.mkdir()
        toolkit = folder / "toolkit"
        (toolkit / "include").mkdir(parents=True)
        (toolkit / "include/cuda_runtime.h").touch()
        (toolkit / "include/starpu_config.h").write_text(
            "#define STARPU_USE_CUDA 1\n")
        self.stub("nvcc", NVCC.format(toolkit))
        self.stub("meson", MESON)
        self.stub("ninja", NINJA)
        self.stub("pkg-config", PKG_CONFIG.format(
            starpu=toolkit / "include" if starpu else "",
            real=shutil.which("pkg-config")))

    def stub(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self, *options):
        """Its exit status, what it said, and what it called."""
        self.calls.write_text("")
        done = subprocess.run(
            [self.folder / "tools/setup", *options], text=True, cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"})
        return done.returncode, done.stdout, self.calls.read_text()


@pytest.fixture
def tree(tmp_path):
    """With CUDA, and with no GPU unless the test says so."""
    if list(pathlib.Path("/dev").glob("nvidia*")) or os.path.exists("/dev/dxg"):
        pytest.skip("a GPU is here")
    tree = Tree(tmp_path, starpu=True)
    tree.stub("nvidia-smi", "#!/bin/sh\nexit 9\n")
    return tree


@pytest.mark.parametrize("options, gpu, target", [
    (["--quick"], 0, " models/gpt2"), (["--quick"], 9, None), ([], 9, "")])
def test_kernels_come_with_a_gpu_or_the_whole_set_up(options, gpu, target, tree):
    """Behind a quick one where there is none."""
    status, out, calls = tree.setup("--quick")
    assert status == 0 and "no GPU here: without kernels" in out, out
    assert "meson setup build -Dcuda=disabled" in calls, calls
    assert calls.endswith("ninja -C build models/gpt2\n"), calls
    tree.stub("nvidia-smi", f"#!/bin/sh\nexit {gpu}\n")
    status, out, calls = tree.setup(*options)
    assert status == 0, out
    if target is None:
        assert "meson" not in calls, out + calls
    else:
        assert "meson setup --reconfigure build -Dcuda=auto\n" in calls, out + calls
        assert calls.endswith(f"ninja -C build{target}\n"), calls
        assert "meson" not in tree.setup()[2]


def test_the_reason_why_there_is_no_source(tmp_path):
    tree = Tree(tmp_path, starpu=False, name="tree")
    tree.stub("apt-get", EXPIRED)
    status, out, _ = tree.setup()
    assert status == 1, out
    assert "  | E: Release file for http://archive.example/InRelease is expired." in out
    assert ".deps/source" in out and "keyring" not in out, out


def test_the_tar_file_of_a_source_is_enough(tmp_path):
    tree = Tree(tmp_path, starpu=False, name="tree")
    (tmp_path / "starpu").mkdir()
    (tmp_path / "starpu/configure").write_text("#!/bin/sh\necho a configure\nexit 1\n")
    (tmp_path / "starpu/configure").chmod(0o755)
    tar = tmp_path / "starpu_1.4.3+dfsg.orig.tar.gz"
    subprocess.run(["tar", "-czf", tar, "-C", tmp_path, "starpu"], check=True)
    tree.stub("apt-get", INCOMPLETE.format(tar))
    status, out, _ = tree.setup()
    assert status == 1 and "not usable" not in out, out
    assert "a configure" in out and "StarPU: configure failed" in out, out


def test_blanks_in_the_path_of_a_build_of_starpu(tmp_path):
    status, out, _ = Tree(tmp_path, starpu=False).setup()
    assert status == 1 and "no path with blanks" in out, out
