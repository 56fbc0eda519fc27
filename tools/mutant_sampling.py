"""Which mutants there are of a file, and in which order a seed draws them."""

import collections
import contextlib
import dataclasses
import io
import os
import random
import re


@dataclasses.dataclass
class Mutant:
    file: str
    line: int
    old: str
    new: str

    def key(self):
        return self.file, self.old.strip(), self.new.strip()


def candidates(source, file):
    """Every mutant of a file, in the order of its lines."""
    from universalmutator import mutator  # only sampling needs it: requirements-dev.txt

    lines = (source / file).read_text(encoding="utf-8").splitlines(keepends=True)
    rules = ["universal.rules", "c_like.rules", "cpp.rules"]
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
        made = mutator.mutants_regexp(lines, rules, ignorePatterns=[r"^\s*//", r"^#"], ignoreStringOnly=True)
    all_of_file = [Mutant(file, number, lines[number - 1], new) for number, new, *_ in made]
    return [mutant for mutant in all_of_file if may_compile(mutant, lines)]


DECLARES = re.compile(r"(?!return|throw|delete|else|case|goto)(static |constexpr |const |mutable |unsigned )*[\w:]+(<[^=]*>)?[*&]* [\w:]+( =|\{|;|\()")
LOOP = r"(for|while) \(|do \{"
NO_OPERATOR = re.compile(r"[%*/]\+|\+[%*/]|[%*/]-|-[%*/]|><|<>|[<>=!]==")
SCAFFOLD = re.compile(r"(namespace|class|struct|enum|union|using|template)\b|public:|private:|protected:|[})\]; ]*(//.*)?$")


def may_compile(mutant, lines):
    """Leaves out, unbuilt, most of what cannot compile or says the same: it is not counted, and would take most of the time. Takes the
    project's format for granted: binary operators stand between spaces, what belongs to a loop is indented below it."""
    old, new = mutant.old.strip(), mutant.new.strip()
    if old.split() == new.split() or SCAFFOLD.match(old):
        return False
    if added := re.search(r"\n\s*(break|continue);$", new):
        if added[1] == "break":
            return inside(mutant, lines, r"(for|while) \(|do \{|(else )?switch \(")
        return inside(mutant, lines, LOOP) and not ends_a_loop(mutant, lines)
    if any(old.count(one) - old.count(other) != new.count(one) - new.count(other) for one, other in ("()", "[]", "{}")):
        return False
    if new.startswith("/*"):
        return not DECLARES.match(old) and not (old.startswith("return") and ends_a_function(mutant, lines))
    if NO_OPERATOR.search(new) and not NO_OPERATOR.search(old):
        return False
    start = len(os.path.commonprefix([old, new]))
    if re.search(r"\w$", old[:start]) and re.match(r"\w", old[start:]):
        return False  # within a name or a hexadecimal number
    at = start - 1 if old[start - 1 : start] in ("<", ">") else start
    return old[at : at + 1] not in tuple("<>*&") or (old[at - 1 : at] == " " and old[at + 1 : at + 2] in tuple(" =<>&"))


def inside(mutant, lines, heads):
    """Whether a line that matches `heads` encloses the mutant, by indentation."""
    depth = indentation(mutant.old)
    for line in reversed(lines[: mutant.line - 1]):
        if line.strip() and indentation(line) < depth:
            depth = indentation(line)
            if re.match(heads, line.strip()):
                return True
    return False


def ends_a_loop(mutant, lines):
    """Whether nothing of a loop's body follows the mutant."""
    return re.match(LOOP, ended_by(mutant, lines)) is not None


def ends_a_function(mutant, lines):
    """Whether the function ends behind the mutant: without its return, the project's flags refuse to compile it."""
    head = ended_by(mutant, lines)
    return head != "" and not re.match(r"(} )?(if|else|for|while|do|switch|case|default)\b", head)


def ended_by(mutant, lines):
    """The first line of the block that ends in the line after the mutant; empty where none does."""
    end = lines[mutant.line] if mutant.line < len(lines) else ""
    if end.strip() != "}":
        return ""
    heads = (line for line in reversed(lines[: mutant.line]) if line.strip() and indentation(line) == indentation(end))
    return next(heads, "").strip()


def indentation(line):
    return len(line) - len(line.lstrip())


def sample(mutants, seed):
    """The mutants in an order that the seed decides: lines are drawn evenly, and none twice before each came once."""
    draw = random.Random(seed)
    lines = collections.defaultdict(list)
    for mutant in mutants:
        lines[mutant.file, mutant.line].append(mutant)
    for of_line in lines.values():
        draw.shuffle(of_line)
    while lines:
        order = sorted(lines)
        draw.shuffle(order)
        for line in order:
            yield lines[line].pop()
            if not lines[line]:
                del lines[line]
