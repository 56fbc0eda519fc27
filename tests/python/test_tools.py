"""What tools/setup.sh says where it cannot go on, and which skipped tests tools/test_totals.py lets pass. Nothing is installed."""

import graphlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path):
    """A clone's folder with a machine of stand-ins: runs setup there, each program of `stands` replaced by a line of shell."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/setup.sh", tmp_path / "tools")
    for list_ in ROOT.glob("requirements*.txt"):
        shutil.copy(list_, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()

    def run(*words, environment={}, **stands):
        for name, line in {"dpkg_query": "echo installed", "apt_get": "exit 1", **stands}.items():
            program = programs / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\n{line}\n")
            program.chmod(0o755)
        path = f"{programs}:/usr/bin:/bin"
        return subprocess.run([tmp_path / "tools/setup.sh", *words], capture_output=True, text=True, timeout=60, env={"PATH": path, **environment})

    return run


# A Python that makes its .venv of a stand-in, which has no torch and whose pip fails.
PYTHON = """case "$*" in
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *"pip show"*) exit 1 ;;
  *"pip install"*) echo "installing $*" >>log; exit ${PIP_STATUS:-0} ;;
  *--version*) echo Python 3.11.2 ;;
esac"""


def refusal(done):
    assert done.returncode == 1, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_without_root_and_sudo_it_says_what_to_ask_for(machine):
    said = refusal(machine(dpkg_query='[ "$3" = libaio-dev ] || echo installed', id="echo 1000", sudo="exit 1", python3=PYTHON))
    assert "not root" in said and "apt-get install -y --no-install-recommends libaio-dev" in said and "then run the same command again" in said


def test_without_room_nothing_is_downloaded(machine, tmp_path):
    said = refusal(machine(df="echo Avail; echo 4", python3=PYTHON))
    assert "room for 4 GB" in said and "free some or clone to a larger drive" in said
    assert not (tmp_path / "log").exists()


def test_a_python_too_old_is_named(machine, tmp_path):
    old = 'case "$*" in *--version*) echo Python 3.9.2 ;; *) exit 1 ;; esac'
    said = refusal(machine(python3=old, environment={"PYTHON": str(tmp_path / "programs/python3")}))
    assert "Python 3.9.2" in said and "3.11 or newer" in said and "PYTHON=path" in said


def test_lists_are_installed_once_and_the_tests_packages_for_tests_alone(machine, tmp_path):
    room = {"df": "echo Avail; echo 40", "python3": PYTHON}
    log = lambda: (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
    assert machine("--program", **room).returncode == 0
    assert [line.split()[-1] for line in log()] == ["requirements.txt"]
    assert machine(**room).returncode == 0 and machine(**room).returncode == 0
    assert [line.split()[-1] for line in log()] == ["requirements.txt", "requirements-test.txt"]
    with open(tmp_path / "requirements-test.txt", "a") as file:
        file.write("# another content\n")
    assert machine(environment={"PIP_STATUS": "1"}, **room).returncode == 1
    assert machine(**room).returncode == 0, "what failed is tried again"
    assert len(log()) == 4 and not (tmp_path / ".venv/tmp").exists()


def report(tmp_path, *cases):
    path = tmp_path / "report.xml"
    path.write_text("<testsuite>" + "".join(f'<testcase classname="a" name="{i}">{case}</testcase>' for i, case in enumerate(cases)) + "</testsuite>")
    return path


def totals(*paths, **environment):
    done = subprocess.run([sys.executable, ROOT / "tools/test_totals.py", *paths], capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout


def test_a_skip_for_want_of_a_gpu_or_of_privilege_passes(tmp_path):
    gtest = "<skipped message='SKIP_REGULAR_EXPRESSION_MATCHED'/><system-out>[ RUN ] a\nx.cpp:1: Skipped\nno CUDA device here\n</system-out>"
    code, said = totals(report(tmp_path, "", gtest, "<skipped message='needs an NVIDIA GPU'/>"))
    assert code == 0 and said.splitlines()[-1] == "1 passed, 0 failed, 2 skipped"
    mounts = "<skipped message='this machine does not let us mount: no root'/>"
    code, said = totals(report(tmp_path, "", gtest, "<skipped message='needs an NVIDIA GPU'/>", mounts, "<skipped message='no dpkg here'/>"))
    assert code == 0 and said.splitlines()[0] == "skipped 2 for want of a GPU, 1 for want of mounts, 1 for another reason"


@pytest.mark.parametrize("case", [
    "<skipped message=\"could not import 'peft': No module named 'peft'\"/>",
    "<skipped message='SKIP_REGULAR_EXPRESSION_MATCHED'/><system-out>x.cpp:1: Skipped\nno Python with the package `tokenizers`\n</system-out>",
    "<skipped message='Unable to find executable: /build/io_test'/>",
    "<skipped message='/build/core_probe is not built'/>",
    "<failure/>",
])
def test_a_skip_for_want_of_what_setup_brings_is_a_failure(tmp_path, case):
    code, said = totals(report(tmp_path, "", case))
    assert code == 1 and said.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


SUITE = "<system-out>Note: Google Test filter = All/A.*\n</system-out>"


def suite_report(folder, *cases):
    (folder / "suites").mkdir(exist_ok=True)
    inner = "".join(f"<testcase name='{i}' status='run' classname='All/A'>{case}</testcase>" for i, case in enumerate(cases))
    (folder / "suites/p.All-A.xml").write_text(f"<testsuites><testsuite name='All/A'>{inner}</testsuite></testsuites>")


def suite(folder, inside=SUITE, status="run"):
    path = folder / "ctest.xml"
    path.write_text(f"<testsuite tests='1'><testcase name='p.All-A' classname='p.All-A' status='{status}'>{inside}</testcase></testsuite>")
    return path


def test_each_suite_has_an_entry_of_its_own(tmp_path):
    program = tmp_path / "some_test"
    program.write_text("#!/bin/sh\nprintf 'Running main() from x\\nA.\\n  one\\n  DISABLED_two\\nAll/B.  # TypeParam\\n  one/x  # GetParam() = x\\n  one/y\\nDISABLED_C.\\n  one\\n'\n")
    program.chmod(0o755)
    subprocess.run([sys.executable, ROOT / "tools/list_suites.py", program, tmp_path / "list", "--reports", "/r", "--label", "gpu"], check=True)
    lines = (tmp_path / "list").read_text().splitlines()
    assert [line for line in lines if line.startswith("add_test")] == [
        f"add_test([==[some_test.{name}]==] [==[{program}]==] [==[--gtest_filter={suite}.*]==])" for name, suite in (("A", "A"), ("All-B", "All/B"))
    ]
    assert "TIMEOUT 720 COST 2" in lines[3] and "OMP_NUM_THREADS=1;" in lines[3] and "xml:/r/some_test.All-B.xml" in lines[3] and "LABELS [==[gpu]==]" in lines[3]


def test_the_tests_of_a_suite_stand_in_the_place_of_its_entry(tmp_path):
    suite_report(tmp_path, "", "<skipped message='x.cpp:1&#10;no CUDA device here'/>", "")
    path = suite(tmp_path)
    for _ in range(2):  # what was read is used up, and the file has it
        assert totals(path)[1].splitlines()[-1] == "2 passed, 0 failed, 1 skipped"
    assert "p.All-A" not in path.read_text() and path.read_text().count("classname=\"All/A\"") == 3 and 'tests="3"' in path.read_text()


def test_a_suite_that_failed_counts_as_its_tests_do(tmp_path):
    suite_report(tmp_path, "", "<failure message='wrong'/>")
    assert totals(suite(tmp_path, SUITE + "<failure/>", "fail")) == (1, "all tests: 1 passed, 1 failed, 0 skipped (ctest 2)\n1 passed, 1 failed, 0 skipped\n")


def test_a_suite_that_ended_early_has_failed(tmp_path):
    assert totals(suite(tmp_path))[1].splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
    suite_report(tmp_path, "")  # all done, and then a crash
    assert totals(suite(tmp_path, SUITE + "<failure/>", "fail"))[1].splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def reasons_to_skip():
    """Every reason that a test of this tree may give, as it stands in the source."""
    pattern = {".py": r'(?:pytest\.skip\(|reason=)f?"([^"]+)"', ".cpp": r'GTEST_SKIP\(\)[\s<]*"([^"]+)"'}
    for path in sorted((ROOT / "tests").rglob("*")):
        for found in re.finditer(pattern[path.suffix], path.read_text()) if path.suffix in pattern else ():
            yield path.name, found[1]


def test_every_reason_to_skip_is_one_that_passes_or_one_that_is_to_fail():
    sys.path.insert(0, str(ROOT / "tools"))
    import test_totals as tool

    to_fail = "is not built|built without LibTorch|no Python with the package|this model keeps nothing"
    reasons = [(name, why) for name, why in reasons_to_skip() if name != "test_tools.py"]
    assert len(reasons) > 40
    assert not [(name, why) for name, why in reasons if not re.search("|".join((*tool.ALLOWED, to_fail)), why)]


def test_a_mount_that_lacks_its_programs_is_a_failure(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "tools"))
    import test_totals as tool

    case = report(tmp_path, "<skipped message='this machine does not let us mount (needs root)'/>")
    monkeypatch.setattr(tool.shutil, "which", lambda name, path: None if name == "mkfs.ext4" else name)
    assert tool.count(case)[0] == (0, 1, 0)
    monkeypatch.setattr(tool.shutil, "which", lambda name, path: name)
    assert tool.count(case)[0] == (0, 0, 1)


def test_a_report_that_is_missing_is_a_failure(tmp_path):
    code, said = totals(report(tmp_path, ""), tmp_path / "absent.xml")
    assert code == 1 and said.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def write(top, **files):
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("path, include, says", [
    ("runtime/base/a.h", "runtime/spec/b.h", "runtime/base may not know spec"),
    ("runtime/planning/a.cpp", "runtime/session/b.h", "runtime/planning may not know session"),
    ("runtime/stream/a.cpp", "runtime/session/b.h", "runtime/stream may not know session"),
    ("runtime/session/a.cpp", "runtime/data/b.h", "runtime/session may not know data"),
    ("runtime/state/a.h", "runtime/tierflow.h", "runtime/state may not know tierflow.h"),
    ("runtime/spec/a.h", "torch/types.h", "runtime/spec is below LibTorch and Python"),
    ("runtime/a.h", "runtime/base/b.h", "lies in no room"),
    ("runtime/cellar/a.h", "runtime/base/b.h", "lies in no room"),
    ("io/a.h", "swap/b.h", "io may not know swap"),
    ("swap/a.h", "optim/b.h", "swap may not know optim"),
    ("optim/a.h", "ATen/ATen.h", "optim is below LibTorch and Python"),
    ("swap/a.cpp", "ranges", "clang 14 cannot compile"),
])  # fmt: skip
def test_an_include_that_points_up_is_a_failure(tmp_path, path, include, says):
    check = [sys.executable, str(ROOT / "tools/check_includes.py"), str(tmp_path)]
    write(tmp_path, **{"runtime/session/door.h": '#include "runtime/base/b.h"\n#include "swap/c.h"\n#include <torch/types.h>\n', "runtime/tierflow.h": ""})
    assert subprocess.run(check, capture_output=True).returncode == 0
    write(tmp_path, **{path: f'#include "{include}"\n'})
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 1 and f"{path}: " in done.stdout and says in done.stdout


def test_the_modules_of_the_package_import_in_one_direction():
    package = ROOT / "bindings/tierflow"
    imports = {path.stem: set(re.findall(r"^\s*from \.(\w+) import", path.read_text(), re.MULTILINE)) for path in package.glob("*.py")}
    graphlib.TopologicalSorter({name: of & imports.keys() - {"__init__"} for name, of in imports.items()}).prepare()  # raises where there is a circle
    assert imports["turns"] and imports["engine"]


def rooms_named(words, above, others):
    """The rooms that a row of the table says: their names, or "all" of them, or "all above", but for some."""
    every = re.fullmatch(r"all( above)?(?: but (.*))?", words)
    names = set(re.findall(r"\w+", words if every is None else every[2] or "")) - {"and"}
    return names if every is None else set(above if every[1] else others) - names


def test_the_table_of_rooms_in_the_docs_is_the_one_that_is_checked():
    sys.path.insert(0, str(ROOT / "tools"))
    from check_includes import ROOMS

    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("| room of `runtime` |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    rooms = [row[0].strip("`") for row in rows]
    assert rooms == list(ROOMS)
    for place, (room, (*_, door, may)) in enumerate(zip(rooms, rows)):
        assert rooms_named(may, rooms[:place], [other for other in rooms if other != room]) == ROOMS[room], room
        assert f"\n// FRONT DOOR of {room}" in (ROOT / "runtime" / room / door.strip("`")).read_text(), door
