"""Documents that name tests, files or functions name such as exist."""
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("core_test", "io_test", "models_test", "optim_test", "session_test", "swap_test", "train_test")


def listed(program):
    names, suite = set(), ""
    for line in subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout.splitlines():
        word = line.split("#")[0].split()
        if word and not line.startswith(" "):
            suite = word[0].rstrip(".").split("/")[-1]
        elif word:
            names.add(f"{suite}.{word[0].split('/')[0]}")
    return names


def test_every_kind_of_fault_has_its_row():
    listed = (ROOT / "docs" / "faults.md").read_text().partition("## Track record")[0]
    numbers = [int(number) for row in re.findall(r"^\| ([\d, ]+) \| ", listed, re.MULTILINE) for number in row.split(", ")]
    assert sorted({*numbers}) == list(range(1, 65))


def test_as_many_kinds_of_fault_have_a_test_as_is_said():
    text = (ROOT / "docs" / "faults.md").read_text()
    tested = text.partition("## Without a test")[0]
    kinds = {int(number) for row in re.findall(r"^\| ([\d, ]+) \| ", tested, re.MULTILINE) for number in row.split(", ")}
    said, other = map(int, re.search(r"Of the 64 kinds, (\d+) have a test that runs by itself, and (\d+) has none", text).groups())
    assert said == len(kinds) >= 54 and {*range(1, 65)} - kinds == {other}


def test_every_fault_has_the_test_that_its_row_names(tierflow):
    programs = [tierflow.parent / name for name in PROGRAMS]
    if not all(program.exists() for program in programs):
        pytest.skip("a test program is not built")
    known = set().union(*(listed(program) for program in programs))
    tested, _, without = (ROOT / "docs" / "faults.md").read_text().partition("## Without a test")
    record = without.partition("## Track record")[2]
    rows = [line for line in (tested + record).splitlines() if line.startswith("| ") and not line.startswith(("| # |", "| what was"))]
    assert record
    assert len(rows) > 64
    for row in rows:
        suite, named = "", 0
        for first, test in re.findall(r"`(\w*)\.(\w+)`", row):
            suite = first or suite
            assert f"{suite}.{test}" in known, row
            named += 1
        for file, test in re.findall(r"`(\w+\.py)::(\w+)`", row):
            assert f"def {test}(" in (ROOT / "tests" / "python" / file).read_text(), row
            named += 1
        assert named, row


def hop_table():
    """Of each row of the table that follows a layer through a step: the cell that names the calls, and the one with the hops of its chains."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## One layer through one step")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]
    return [row.strip("| ").split(" | ")[-2:] for row in rows] + chains_in_prose()


def chains_in_prose():
    """The same of the sentences that say how long a chain is."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    return [[chain, hops] for hops, chain in re.findall(r"has (\d+) hops: ((?:[;,]? ?`[^`]+`)+)", text)]


def calls(table):
    """Of each row the calls that it names: the files that may have it, its class if it stands there, its function. A file holds until the row names another;
    a class that was named with its file stays in that file."""
    home, seen = {}, []
    for cell, _ in table:
        found, file = [], None
        for named in re.findall(r"`([^`]+)`", cell):
            path, _, name = named.rpartition(": ")
            if path:
                file = ROOT / path if (ROOT / path).exists() else ROOT / "swap" / path
            scope, _, function = name.rpartition("::")
            if scope:
                home[scope] = file if path else home.get(scope, file)
            place = home[scope] if scope else file
            if place:
                seen.append(place)
            found.append(([place] if place else seen, scope, function))
        yield cell, found


def defines(file, scope, function):
    text = file.read_text()
    member = scope == "" or f"{scope}::{function}(" in text or re.search(rf"(class|struct) {scope}\b", text)
    return member and re.search(rf"^ *(?!return |throw )([\w:<>,&* ]*[\w>&*] [&*]*)?(\w+::)*{function}\((.*[^;])?$", text, re.MULTILINE)


def test_the_hop_table_names_functions_that_exist():
    table = hop_table()
    assert len(table) > 9 and chains_in_prose()
    for cell, found in calls(table):
        assert found, cell
        for files, scope, function in found:
            assert all(file.exists() for file in files), f"{files}: named in: {cell}"
            assert any(defines(file, scope, function) for file in files), f"{scope}::{function} in {files}: named in: {cell}"


def test_what_the_prose_names_by_its_class_or_file_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    sources = {path: path.read_text() for folder in ("io", "optim", "swap", "runtime") for path in (ROOT / folder).rglob("*.*") if path.suffix in (".h", ".cpp", ".cu")}
    members = re.findall(r"`(?:[\w/.]+: )?((?:\w+::)*\w+)::(\w+)(?:\(\))?`", text)
    assert len(members) > 40
    for scope, name in members:
        owner = scope.rpartition("::")[2]
        of_class = re.compile(rf"\b(class|struct|namespace) {owner}\b[^;]*{{")
        assert any(f"{owner}::{name}" in source or of_class.search(source) and re.search(rf"\b{name}\b", source) for source in sources.values()), f"{scope}::{name}"
    for path, name in re.findall(r"`([\w/]+\.(?:cpp|h|cu)): (\w+)`", text):
        assert any(str(file).endswith(f"/{path}") and re.search(rf"\b{name}\b", source) for file, source in sources.items()), f"{path}: {name}"


def definitions(file, scope, function):
    """(parameters, body) of each function of that name in the file: of the class where one is named; members may stand in it."""
    text, name = file.read_text(), scope.rpartition("::")[2]
    for found in re.finditer(rf"((?:\w+::)*)\b{function}\(", text):
        end = closing(text, found.end() - 1, "()")
        opens = re.match(r"\)(?:\s|const\b|override\b|final\b|noexcept\b)*({)", text[end : end + 60])
        if opens and (not name or not found[1] or found[1].endswith(f"{name}::")):
            begin = end + opens.start(1)
            yield text[found.end() : end], text[begin : closing(text, begin, "{}")]


def closing(text, at, pair):
    """Where the bracket that opens at `at` is closed."""
    depth = 0
    for at in range(at, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return at
    raise ValueError(text[at:])


def chains(cell, found):
    """The chains of calls in a cell: the one from the loop of a thread, and the one of the end; without what stands there as another choice."""
    whole = cell.partition(". In the end: ")[0]
    places = [(where[1] is None, where.start()) for where in re.finditer(r"(, or )?`[^`]+`", cell)]
    for begin, stop in [(0, len(whole)), (len(whole), len(cell))]:
        if "as in" not in cell[begin:stop]:  # that names what differs alone
            yield [each for each, (counts, at) in zip(found, places) if counts and begin <= at < stop]


def leads(caller, callee, before):
    """Whether the source text of the first calls the other one. A function that runs what it was given calls what the one before it names; what is only declared
    leads to the function of that name, which overrides it."""
    files, scope, function = caller
    found = [each for file in files for each in definitions(file, scope, function)]
    name = re.compile(rf"\b{callee[2]}\(")
    if any(name.search(body) for _, body in found):
        return True
    if not found:
        return function == callee[2]
    given = any(re.search(rf"\b{each}\(", body) for parameters, body in found for each in re.findall(r"(\w+)(?=,|$)", parameters))
    return given and before is not None and leads(before, callee, None)


def test_each_function_of_the_hop_table_calls_the_next():
    followed = 0
    for cell, found in calls(hop_table()):
        for chain in chains(cell, found):
            for before, caller, callee in zip([None, *chain], chain, chain[1:]):
                assert leads(caller, callee, before), f"{caller[1]}::{caller[2]} does not call {callee[1]}::{callee[2]}: {cell}"
                followed += 1
    assert followed > 40


def test_no_chain_of_the_hop_table_is_longer_than_eight():
    for cell, hops in hop_table():
        assert all(int(count) <= 8 for count in hops.split(", ")), cell
        if "as in" in cell:  # it names what differs alone
            continue
        chain = re.sub(r", or `[^`]+`", "", cell).partition(". In the end")[0]
        assert chain.count("`") // 2 - 1 == int(hops), cell


OPTION = r"(?<![\w-])--[a-z][\w-]*\b(?!-)"


def commands():
    """Each piece of code of the documents that is one line: its file, and the line without its comment."""
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/adapters/README.md"]:
        text = document.read_text()
        blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^    .*$|`[^`\n]+`", text, re.MULTILINE) + [line for block in blocks for line in block.splitlines()]:
            yield document.name, re.split(r"  #|   \(", line)[0]


def test_commands_name_options_and_scripts_that_exist(tierflow):
    paths = [path for folder in ("benchmarks", "examples", "tools", "tests") for kind in ("py", "sh") for path in (ROOT / folder).rglob(f"*.{kind}")]
    scripts = {str(path.relative_to(ROOT)): {*re.findall(OPTION, path.read_text())} for path in paths}
    helps = {}
    for command in ("init", "train", "plan", "data prepare", "data preview", "eval", "generate", "merge", "export", "status", "verify", "bench storage", "bench optimizer"):
        helps[command] = {*re.findall(OPTION, subprocess.run([tierflow, *command.split(), "--help"], capture_output=True, text=True, check=True).stdout)}
    known, named = {"--exclude", "--local-dir", "--no-build-isolation"}.union(*scripts.values(), *helps.values()), 0  # those are of hf and pip
    for document, line in commands():
        program = re.search(r"(?:^|[ /`])tierflow ((?:data|bench) \w+|\w+) (.*)", line)
        if program and program[1] in helps:
            assert {*re.findall(OPTION, program[2])} <= helps[program[1]], f"{document}: {line}"
        for path, rest in re.findall(r"((?:benchmarks|examples|tools)/[\w/]+\.(?:py|sh))\b([^;]*)", line):
            assert path in scripts, f"{document}: {line}"
            folder = set().union(*(found for name, found in scripts.items() if name.rpartition("/")[0] == path.rpartition("/")[0]))
            assert {*re.findall(OPTION, rest)} <= folder, f"{document}: {line}"
        options = {*re.findall(OPTION, line)} if "-->" not in line and "<--" not in line else set()
        assert options <= known, f"{document}: {line}"
        named += len(options)
    assert named > 500
