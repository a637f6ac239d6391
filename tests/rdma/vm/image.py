"""The virtual machine's kernel and root file system, built once and kept in a cache folder.

Debian packages are unpacked, not configured, pruned to what the tests need, joined by the Python
packages that a connector imports, and packed as one initial RAM disk: the machine needs no disk,
and nothing that a run does can outlive it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.requirements import pins

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SUITE = "bookworm"
PYTHON = "3.11"
DEBS = (
    "coreutils",
    "dash",
    "grep",
    "ibverbs-providers",
    "iproute2",
    "kmod",
    "libcurl4",
    "libibverbs1",
    "libnuma1",
    "librdmacm1",
    "libstdc++6",
    "linux-image-amd64",
    "mount",
    "python3",
)
# The devices ask for the checksum of each packet by its name, so no dependency names it.
MODULES = ("veth", "rdma_rxe", "crc32_generic", "ib_uverbs", "sch_netem")
WHEELS = (
    "hypothesis",
    "llguidance",
    "mooncake-transfer-engine-non-cuda",
    "msgpack",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pyzmq",
    "xxhash",
)
# Of Mooncake only the engine is used: its store, its servers and their libraries are most of it.
NEEDLESS = (
    "var",
    "usr/share",
    "usr/lib/x86_64-linux-gnu/perl*",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/libicu*",
    "usr/bin/perl*",
    "lib/systemd",
    "site/bin",
    "site/mooncake/mooncake_*",
    "site/mooncake/store.so",
    "site/mooncake/transfer_engine_bench",
    "site/numpy/*/tests",
    "site/zmq/tests",
)
HOST_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "cpio": "cpio",
}
APT_LIMIT_S = 180
BUILD_LIMIT_S = 240

Say = Callable[[str], None]


class CannotBuild(Exception):
    """This machine cannot have the virtual machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """What QEMU boots."""

    kernel: Path
    initrd: Path


def make_image(say: Say) -> Image:
    """The cached image, or a new one where its recipe changed. Raises `CannotBuild`."""
    cache = _cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"image-{_key()}"
    image = Image(folder / "vmlinuz", folder / "initrd.cpio")
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [tool for tool in HOST_TOOLS if shutil.which(tool) is None]
        if missing:
            _install([HOST_TOOLS[tool] for tool in missing], say)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as work:
                _build(Path(work), say)
                for outdated in cache.glob("image-*"):
                    shutil.rmtree(outdated)
                (Path(work) / "done").rename(folder)
    return image


def pack(tree: Path, out: Path) -> None:
    """Write `tree` to `out` as an archive that the kernel unpacks at boot."""
    with out.open("wb") as archive:
        names = "\0".join(sorted(str(path.relative_to(tree)) for path in tree.rglob("*")))
        command = ["cpio", "--null", "--create", "--quiet", "--format=newc", "--owner=0:0"]
        subprocess.run(command, input=names.encode(), stdout=archive, cwd=tree, check=True)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pdserve" / "rdma-vm"


def _key() -> str:
    """Return a hash of everything that determines the image's content."""
    recipe = [Path(__file__).read_text(), (HERE / "guest_init.sh").read_text(), *pins_of_wheels()]
    return hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]


def pins_of_wheels() -> list[str]:
    """The wheels with everything that they need, as the project pins it."""
    pinned = pins((ROOT / "requirements.txt").read_text())
    needed = {*WHEELS, "iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers"}
    return [pin.text for name, pin in pinned.items() if name in needed]


def _install(debs: Sequence[str], say: Say) -> None:
    if os.geteuid() != 0:
        raise CannotBuild(f"not root, and {', '.join(debs)} must be installed")
    if shutil.which("apt-get") is None:
        raise CannotBuild(f"no apt-get to install {', '.join(debs)} with")
    say(f"installing {', '.join(debs)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *debs]
    for command in (["apt-get", "update", "-qq"], install):
        run(command, APT_LIMIT_S, env=environment)


def _build(work: Path, say: Say) -> None:
    if os.geteuid() != 0:
        raise CannotBuild("not root, and Debian packages must be unpacked")
    root, done = work / "root", work / "done"
    done.mkdir()
    say(f"unpacking Debian {SUITE} and a kernel (once, about half a minute)")
    unpack = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(DEBS)}"]
    run([*unpack, SUITE, str(root), *_mirrors()], BUILD_LIMIT_S)
    say("adding Python packages")
    site = root / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    target = ["--target", str(site), "--python-version", PYTHON, "--only-binary=:all:"]
    pinned = work / "requirements.txt"
    pinned.write_text("\n".join(pins_of_wheels()) + "\n")
    verified = ["--no-deps", "--require-hashes", "-r", str(pinned)]
    run([*pip, "--no-compile", *target, *verified], BUILD_LIMIT_S)
    say("packing")
    (kernel,) = (root / "boot").glob("vmlinuz-*")
    kernel.rename(done / "vmlinuz")
    _prune(root, kernel.name.removeprefix("vmlinuz-"))
    _configure(root)
    pack(root, done / "initrd.cpio")


def _mirrors() -> list[str]:
    """Where apt gets this suite from, if it does; else mmdebstrap's own choice."""
    shown = ["$(REPO_URI)", "Identifier: Packages", f"Codename: {SUITE}", "Component: main"]
    found = run(["apt-get", "indextargets", "--format", *shown], APT_LIMIT_S).split()
    return sorted(set(found))[:1]


def _prune(root: Path, version: str) -> None:
    run(["chroot", str(root), "depmod", version], BUILD_LIMIT_S)
    modules = root / "lib" / "modules" / version
    kept = with_dependencies((modules / "modules.dep").read_text())
    for path in modules.rglob("*.ko"):
        if str(path.relative_to(modules)) not in kept:
            path.unlink()
    for pattern in ("boot/*", *NEEDLESS):
        for path in root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def with_dependencies(modules_dep: str) -> set[str]:
    """The paths of `MODULES` and of all that they need, of lines `path: path path…`."""
    needs = dict(line.split(":", 1) for line in modules_dep.splitlines())
    kept: set[str] = set()
    for path, dependencies in needs.items():
        if Path(path).stem in MODULES:
            kept |= {path, *dependencies.split()}
    return kept


def _configure(root: Path) -> None:
    """Do the necessary part of what the packages' own scripts would have done."""
    shutil.copy(HERE / "guest_init.sh", root / "init")
    (root / "init").chmod(0o755)
    (root / "etc/hosts").write_text("127.0.0.1 localhost rdma\n")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    # Compiling takes the emulated processor many seconds at every start.
    compiler = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    run(["chroot", str(root), *compiler, "/site", f"/usr/lib/python{PYTHON}"], BUILD_LIMIT_S)


def run(command: Iterable[str], limit_s: float, env: dict[str, str] | None = None) -> str:
    """The command's output. Raises `CannotBuild` with the end of its errors."""
    arguments = list(command)
    try:
        done = subprocess.run(
            arguments, env=env, timeout=limit_s, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise CannotBuild(f"{arguments[0]} is not here") from None
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{arguments[0]} took more than {limit_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise CannotBuild(f"{arguments[0]} failed: {error.stderr.strip()[-500:]}") from None
    return done.stdout
