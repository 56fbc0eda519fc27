#!/usr/bin/env python3
"""Packs what a machine with a GPU needs to prove and measure Tierflow: programs of a build folder, the libraries that a Python with torch
does not bring, models, tokens and scripts. `make gpu-kit` builds and calls it; docs/cuda.md says what becomes of the archive.

    .venv/bin/python tools/gpu_kit.py --build BUILD --out kit.tar.xz      (or .tar.gz)"""
import argparse
import array
import json
import pathlib
import random
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS = ["tierflow", "libtierflow_train.so", "device_test", "optim_gpu_test", "gpu_test", "device_bench"]
KERNEL_LOG = "libkernel_log.so"  # where CUPTI was installed
NAME = "tierflow-gpu-kit"
# What every Linux has; a kit must not bring its own.
GLIBC = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|libresolv|ld-linux-[\w-]+)\.so\.\d+$")
# Of the compiler: the machine's own, unless that is too old for the programs.
RUNTIME = re.compile(r"(libstdc\+\+|libgcc_s)\.so\.\d+$")


class Refused(Exception):
    pass


def said(*words):
    try:
        return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"{words[0]} failed: {(getattr(error, 'stderr', None) or str(error)).strip().splitlines()[-1]}") from error


def dynamic(path, tag):
    """The values of one kind in a file's dynamic section: NEEDED, RUNPATH, RPATH."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", said("readelf", "--dynamic", "--wide", path))


def library_folders(python):
    """torch's folder, and those whose libraries come with torch on any machine."""
    code = "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations, *(u.find_spec('nvidia') or u.find_spec('torch')).submodule_search_locations, sep='\\n')"
    torch, *others = [pathlib.Path(line) for line in said(python, "-c", code).split("\n") if line]
    return torch, [torch / "lib", *(folder for place in others for folder in place.glob("*/lib"))]


def on_this_machine():
    """Paths of the system's libraries by name."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    found = {}
    for line in said(ldconfig, "-p").splitlines():
        match = re.match(r"\s+(\S+) \((.*)\) => (.*)", line)
        if match and ("x86-64" in match[2] or "AArch64" in match[2]):
            found.setdefault(match[1], match[3])
    return found


def with_libraries(programs, brought):
    """Paths by name of the libraries that the programs need, and those need, and that nobody else brings."""
    system, wanted, open_ = on_this_machine(), {}, list(programs)
    while open_:
        for name in dynamic(open_.pop(), "NEEDED"):
            if name in wanted or GLIBC.match(name) or any((folder / name).exists() for folder in brought):
                continue
            if name not in system:
                raise Refused(f"{name}, which the programs need, is neither in torch's wheels nor known to ldconfig")
            wanted[name] = pathlib.Path(system[name]).resolve()
            open_.append(wanted[name])
    return wanted


def with_own_path(path):
    """The search path that the build left in a program names the builder's folders: it becomes that of the kit."""
    content = path.read_bytes()
    for old in {*dynamic(path, "RUNPATH"), *dynamic(path, "RPATH")}:
        new, whole = b"$ORIGIN/../lib", b"\0" + old.encode() + b"\0"
        if len(new) > len(old.encode()) or content.count(whole) != 1:
            raise Refused(f"{path.name}: its search path {old} cannot be replaced")
        content = content.replace(whole, b"\0" + new.ljust(len(old.encode()), b"\0") + b"\0")
    path.write_bytes(content)


def stripped(source, to):
    if not source.exists():
        raise Refused(f"{source} is not built")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, to)
    said("strip", "--strip-unneeded", to)


def write_tokens(path, count, vocabulary, code, kind):
    """A NumPy file of random ids."""
    chosen = random.Random(1)
    ids = array.array(kind, (chosen.randrange(vocabulary) for _ in range(count)))
    if sys.byteorder == "big":
        ids.byteswap()
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': ({count},), }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + ids.tobytes())


def cached(build, name):
    try:
        found = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    except OSError as error:
        raise Refused(f"{build} is no build folder: {error.strerror}") from error
    return found[1] if found else ""


def version_of_source():
    try:
        return said("git", "-C", ROOT, "describe", "--always", "--dirty").strip()
    except Refused:
        return "unknown"


def glibc_of(files):
    """The newest version of the C library that any of them needs."""
    found = {tuple(map(int, version.split("."))) for path in files for version in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", said("readelf", "--version-info", "--wide", path))}
    return ".".join(map(str, max(found, default=(2,))))


def fill(kit, build, python):
    torch, brought = library_folders(python)
    version = runpy.run_path(str(torch / "version.py"))
    for name in PROGRAMS:
        stripped(build / name, kit / "bin" / name)
        with_own_path(kit / "bin" / name)
    for name, path in with_libraries([kit / "bin" / name for name in PROGRAMS], brought).items():
        stripped(path, kit / ("lib/runtime" if RUNTIME.match(name) else "lib") / name)
    if (build / KERNEL_LOG).exists():
        stripped(build / KERNEL_LOG, kit / "lib" / KERNEL_LOG)
        with_own_path(kit / "lib" / KERNEL_LOG)
    (kit / "data").mkdir()
    for model in sorted((ROOT / "tools/gpu_kit/models").glob("*.json")):
        shutil.copy(model, kit / "data")
    write_tokens(kit / "data/tokens.npy", 600_000, 128_256, "<u4", "I")
    write_tokens(kit / "data/tokens-tiny.npy", 20_000, 512, "<u2", "H")
    (kit / "scripts").mkdir()
    for script in [*sorted((ROOT / "tools/gpu_kit").glob("*.py")), ROOT / "benchmarks/gpu/bench.py"]:
        shutil.copy(script, kit / "scripts")
    shutil.copy(ROOT / "tools/gpu_kit/gpu_session.sh", kit)
    shutil.copy(ROOT / "LICENSE", kit)
    architecture = cached(build, "CMAKE_CUDA_ARCHITECTURES") or ("as its toolkit chose" if cached(build, "CMAKE_CUDA_COMPILER") else "none: without CUDA")
    about = {"source": version_of_source(), "gpu_arch": architecture, "glibc": glibc_of([*(kit / "bin").iterdir(), *(kit / "lib").glob("*.so*")]),
             "glibc_of_runtime": glibc_of([*kit.glob("bin/*"), *kit.glob("lib/*.so*"), *kit.glob("lib/runtime/*")]), "torch_version": version["__version__"], "torch_git_version": version["git_version"],
             "torch_cuda": version["cuda"]}
    (kit / "kit.json").write_text(json.dumps(about, indent=1) + "\n")


def pack(folder, out):
    """The archive under its name when it is whole; what it holds belongs to root."""
    def plain(entry):
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    part = out.with_name(out.name + ".part")
    try:
        with tarfile.open(part, "w:gz" if out.name.endswith("gz") else "w:xz") as archive:
            archive.add(folder, folder.name, filter=plain)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def make(args):
    with tempfile.TemporaryDirectory() as temporary:
        kit = pathlib.Path(temporary) / NAME
        fill(kit, args.build, args.python or cached(args.build, "TIERFLOW_PYTHON"))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        part = pack(kit, args.out)
        size, most = part.stat().st_size, args.limit_mib * (1 << 20)
        if size > most:
            part.unlink()
            largest = max((path for path in kit.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
            raise Refused(f"the archive would be {size / (1 << 20):.2f} MiB, and a kit has at most {args.limit_mib:g}; its largest file is {largest.relative_to(kit)}, "
                          f"{largest.stat().st_size / (1 << 20):.2f} MiB unpacked")
        part.rename(args.out)
        about = json.loads((kit / "kit.json").read_text())
    print(json.dumps({"kit": str(args.out), "mib": round(size / (1 << 20), 2), **about}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the archive: .tar.xz, or .tar.gz, which is larger and made sooner")
    parser.add_argument("--limit-mib", type=float, default=56, help="the archive's size at most (56: with a checkout of the sources it stays below 64)")
    parser.add_argument("--python", help="whose torch the programs were linked with; left out: the build folder's")
    args = parser.parse_args()
    try:
        make(args)
    except (Refused, OSError) as error:
        sys.exit(f"gpu-kit: {error}")


if __name__ == "__main__":
    main()
