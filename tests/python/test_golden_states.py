"""Whole states of every kind that an earlier version left, in golden/NAME.tar.xz, are read and gone on with: header, superblocks, manifest, extents, note, identity, progress. (The ordinary one is in test_resume.py.)"""
import hashlib
import json
import os
import pathlib
import shutil
import tarfile

import numpy
import pytest
from program import config, needs_torch, run, small, steps_of

pytestmark = needs_torch

GOLDEN = pathlib.Path(__file__).parent / "golden"
FOLDERS = {"two-folders": "store,other"}
LORA = ["--method", "lora", "--base-precision", "nf4", "--lora-rank", "4"]
# By name: what is said besides, and the sum of the weights that are exported of it; None where products of matrices are in them, which machines round
# differently.
STATES = {
    "lora-nf4": (["--model", "base", *LORA], "161e58391aa8f3a85780a60281f120b51e5cb08a0ab59787f3f793174ee736f2"),
    "adam32": (["--config", "config.json", "--precision", "fp32-master+adam32"], "f3de4007a9abed351e716585746b8466449957532d914c3dd59708542634e7e9"),
    "bf16-sr": (["--config", "config.json", "--precision", "bf16-sr+adam8"], "5aef52985bbf80cc7425980900e48f0ebf43ab81911e29fe97852c9059805abc"),
    "two-folders": (["--config", "config.json"], "7c64ef24e517761558e4d3f122cb227d0524e68425b6be875df8b88e6c22ef15"),
    "galore": (["--model", "base", "--method", "galore", "--rank", "4", "--update-gap", "3", "--scale", "0.5"], None),
}


def words_of(name):
    return ["train", *STATES[name][0], "--data", "tokens.npy", "--held-out", "0", "--lr", "1e-3", "--lr-schedule", "constant", "--seed", "5", "--log-json", "log.json",
            *small("--sequence-length", "16", "--storage", FOLDERS.get(name, "store"), "--host-memory", "1MiB")]  # fmt: skip


def make(work, name):
    """The state after two steps of four."""
    work.mkdir(exist_ok=True)
    (work / "config.json").write_text(json.dumps(config(hidden=16, layers=1, vocab=64, intermediate_size=32)))
    numpy.save(work / "tokens.npy", numpy.random.default_rng(3).integers(0, 64, 4096, dtype=numpy.uint16))
    if "--model" in STATES[name][0]:
        run(work, "init", "--config", "config.json", "--out", "base", "--seed", "4")
    run(work, *words_of(name), "--steps", "2", "--no-export")
    (work / "log.json").unlink()


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_an_earlier_version_left_is_gone_on_with(tmp_path, name):
    """TIERFLOW_WRITE_GOLDEN=1 makes the file anew, where the format changes; the sum in STATES too."""
    file = GOLDEN / f"{name}.tar.xz"
    if "TIERFLOW_WRITE_GOLDEN" in os.environ:
        make(tmp_path / "made", name)
        for note in (tmp_path / "made").glob("*/*.owner"):  # of no machine in particular
            note.write_text(json.dumps({**json.loads(note.read_text()), "pid": 1, "host": "workstation", "folders": []}) + "\n")
        with tarfile.open(file, "w:xz", preset=9) as archive:
            for path in sorted((tmp_path / "made").iterdir()):
                archive.add(path, path.name)
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    storage = FOLDERS.get(name, "store")
    status = json.loads(run(tmp_path, "status", storage, "--json").stdout)
    assert status["step"] == 2 and status["resumable"], status
    make(tmp_path / "anew", name)
    anew = json.loads(run(tmp_path / "anew", "status", storage, "--json").stdout)["run"]
    assert {key: value for key, value in anew.items() if key != "model"} == status["run"]  # later versions know its weights too
    run(tmp_path, "verify", storage)
    run(tmp_path, "export", "--storage", storage, "--out", "exported")
    (weights,) = (tmp_path / "exported").glob("*.safetensors")
    assert STATES[name][1] in (None, hashlib.sha256(weights.read_bytes()).hexdigest())
    done = run(tmp_path, *words_of(name), "--steps", "4", "--out", "out")
    assert "resumed after step 2 of 4" in done.stderr and [record["step"] for record in steps_of(tmp_path / "log.json")] == [3, 4]
    assert not [*tmp_path.glob("store/*"), *tmp_path.glob("other/*")]
    # Close to a run that was never stopped: this machine may round otherwise than the one that made the file.
    shutil.rmtree(tmp_path / "anew" / "store")
    shutil.rmtree(tmp_path / "anew" / "other", ignore_errors=True)
    run(tmp_path / "anew", *words_of(name), "--steps", "4", "--out", "out")
    whole = [record["loss"] for record in steps_of(tmp_path / "anew" / "log.json")]
    assert [record["loss"] for record in steps_of(tmp_path / "log.json")] == pytest.approx(whole[2:], rel=1e-2)  # as golden losses elsewhere
