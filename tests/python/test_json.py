"""docs/json.md names every key that the commands print."""

import json
import re

import pytest

from conftest import ROOT
from program import config, needs_torch, run, small

pytestmark = needs_torch

SECTIONS = re.split(r"^## ", (ROOT / "docs/json.md").read_text(), flags=re.MULTILINE)
PLAIN = r"[a-z0-9_]+"  # what is a name, and not a lane's, a precision's or an option's


def words_of(section):
    (text,) = (text for text in SECTIONS if text.startswith(section + "\n"))
    return set(re.findall(r"`([a-z0-9_]+)`", text))


def keys(value, leave_out=()):
    if isinstance(value, dict):
        return {key for key in value if re.fullmatch(PLAIN, key)} | {name for key, held in value.items() if key not in leave_out for name in keys(held, leave_out)}
    return {name for held in value for name in keys(held, leave_out)} if isinstance(value, list) else set()


@pytest.mark.parametrize("options", [["--eval-every", "2", "--export-best", "--export-every", "2"], ["--method", "galore", "--rank", "4", "--update-gap", "2"]])
def test_a_runs(work, options):
    words = ["train", "--data", "text.txt", "--steps", "4", "--out", "out", "--log-json", "log.json", *small("--storage", "store", "--host-memory", "2MiB"), *options]
    run(work, "init", "--config", "config.json", "--out", "model")
    run(work, *words, "--model", "model")
    lines = [json.loads(line) for line in (work / "log.json").read_text().splitlines()]
    assert {"config", "data", "durability", "loss", "summary"} <= keys(lines, ["config"])
    assert keys(lines, ["config"]) - words_of("A run") == set()


def test_a_plans(work):
    made = json.loads(run(work, "plan", "--config", "config.json", "--json", *small("--storage", "store", "--host-memory", "2MiB")).stdout)
    assert len(keys(made)) > 100 and keys(made, ["stalls"]) - words_of("A plan") - words_of("A run") == set()


def test_a_states(work):
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--steps", "2", "--out", "out", "--no-export", *small("--storage", "store", "--host-memory", "2MiB"))
    for command in ("status", "verify"):
        said = json.loads(run(work, command, "store", "--json").stdout)
        assert said.keys() - words_of("A state") == set()
