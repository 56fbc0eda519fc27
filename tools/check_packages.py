"""Every header and library outside the tree that a build opened comes from what tools/setup.sh installs: torch's wheel, the
interpreter of .venv, the CUDA toolkit, or a Debian package that setup names or one of those depends on.

    python3 tools/check_packages.py BUILD      77 ("skipped") where there is no dpkg
"""

import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(*words, check=True):
    return subprocess.run([*map(str, words)], check=check, capture_output=True, text=True).stdout


def cached(build, name):
    found = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    return found.group(1) if found else ""


def headers(build):
    """What the compiler read."""
    return {build / line.strip() for line in run("ninja", "-C", build, "-t", "deps").splitlines() if line.startswith("    ")}


def libraries(build):
    """What the linker was given by its path or as -lNAME."""
    found = set()
    for line in run("ninja", "-C", build, "-t", "commands").splitlines():
        if " -c " in line or " -o " not in line:
            continue
        for word in shlex.split(line):
            if re.search(r"\.(a|so)(\.[0-9.]+)?$", word) and not word.startswith("-"):
                found.add(build / word)
            elif word.startswith("-l"):
                paths = [run("c++", f"-print-file-name=lib{word[2:]}{kind}").strip() for kind in (".so", ".a")]
                found.update(pathlib.Path(path) for path in paths if "/" in path)
    return found


def own_places(build):
    """Folders whose files need no package: the tree, torch, the CUDA toolkit, the interpreter of .venv unless it is the system's."""
    python = cached(build, "TIERFLOW_PYTHON")
    code = "import sysconfig, importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], sysconfig.get_paths()['include'], sep='\\n')"
    places = [ROOT, build, *run(python, "-c", code).split()]
    nvcc = cached(build, "TIERFLOW_NVCC")
    if nvcc and not nvcc.endswith("NOTFOUND"):
        places.append(pathlib.Path(nvcc).resolve().parents[1])
    return [pathlib.Path(place).resolve() for place in places if not str(place).startswith("/usr/include")]


def packages_that_setup_brings():
    """The packages that setup names, and all that these depend on, among those that are installed."""
    needs, provided = {}, {}
    for line in run("dpkg-query", "-W", "-f", "${Package}\\t${Depends}, ${Pre-Depends}\\t${Provides}\\n").splitlines():
        name, depends, provides = line.split("\t")
        words = lambda text: re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]*)", text)
        needs.setdefault(name, set()).update(words(depends))
        for virtual in [name, *words(provides)]:
            provided.setdefault(virtual, set()).add(name)
    brought, open_ = set(), run(ROOT / "tools/setup.sh", "--list-packages").split()
    while open_:
        for name in provided.get(open_.pop(), set()) - brought:
            brought.add(name)
            open_.extend(needs[name])
    return brought


def owners(paths):
    """Of each path the packages that it belongs to; absent where none has it."""
    found = {}
    # /usr/lib is /lib: the older packages list their files without /usr.
    names = {name for path in paths for name in (str(path), str(path).removeprefix("/usr"))}
    for line in run("dpkg-query", "-S", *names, check=False).splitlines():
        listed, _, path = line.partition(": ")
        for name in (path, f"/usr{path}"):
            found.setdefault(name, set()).update(owner.split(":")[0] for owner in listed.split(", "))
    return found


def main(build):
    try:
        brought = packages_that_setup_brings()
    except FileNotFoundError:
        print("SKIPPED: no dpkg here: whose the headers and libraries are is not known")
        return 77
    places = own_places(build)
    opened = {path.resolve() for path in headers(build) | libraries(build)}
    outside = sorted(path for path in opened if not any(path.is_relative_to(place) for place in places))
    if len(outside) < 100:
        print(f"{build}: {len(outside)} files outside the tree: is it built?")
        return 1
    found, strange = owners(outside), 0
    for path in outside:
        of = found.get(str(path), set())
        if not of & brought:
            strange += 1
            print(f"{path}: {'of ' + ', '.join(of) + ', which' if of else 'of no package, and'} tools/setup.sh does not install")
    print(f"{len(opened)} headers and libraries, {len(outside)} of them from packages; {strange} of none that tools/setup.sh installs")
    return int(strange > 0)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
