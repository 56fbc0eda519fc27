"""What runs in a fork of a loaded program is what runs in a process of its own."""
import os
import pathlib
import subprocess

import fork_server
import pytest
from program import BUILD, PROGRAM, needs_torch, run

PRELOAD = BUILD / "libfork_server.so"


@pytest.fixture
def shell():
    server = fork_server.ForkServer("/bin/sh", PRELOAD, None)
    yield lambda script, cwd="/", timeout=60, **env: server.run(["sh", "-c", script], cwd, timeout, env)
    server.ours.close()
    assert server.process.wait(timeout=60) == 0  # it ends with its socket


def test_a_fork_gets_the_folder_the_variables_and_the_streams(shell, tmp_path):
    done = shell('pwd; echo "$WORD"; env | grep -c FORK_SERVER; ls /proc/$$/fd | wc -l; read line || echo end; echo wrong >&2; exit 3', tmp_path, WORD="two words", PATH=os.environ["PATH"])
    assert done.returncode == 3 and done.stderr == "wrong\n"
    assert done.stdout.splitlines() == [str(tmp_path), "two words", "0", "3", "end"]
    assert shell("kill -TERM $$").returncode == -15
    assert shell("echo $WORD").stdout == "\n"  # nothing of the one before


def test_a_fork_that_takes_too_long_is_killed(shell, tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        shell("echo $$ >pid; exec sleep 600", tmp_path, timeout=1, PATH=os.environ["PATH"])
    assert not pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert shell("echo next").stdout == "next\n"


def test_a_program_that_began_threads_is_not_forked(tmp_path):
    (tmp_path / "thread.c").write_text("#include <pthread.h>\n#include <unistd.h>\nstatic void *wait(void *p) { for (;;) pause(); return p; }\n"
                                       "__attribute__((constructor)) static void begin(void) { pthread_t t; pthread_create(&t, 0, wait, 0); }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c", "-o", tmp_path / "thread.so", tmp_path / "thread.c", "-pthread"], check=True)
    server = fork_server.ForkServer("/bin/sh", PRELOAD, tmp_path / "thread.so")
    assert server.process.wait(timeout=60) == 125
    server.ours.close()


@needs_torch
def test_the_program_says_the_same(work):
    for words in (["eval", "--model", "nothing", "--data", "text.txt"], ["train", "--confi"], ["help", "train"], ["status", "--storage", "none"]):
        forked, own = fork_server.run([PROGRAM, *words], cwd=work), subprocess.run([PROGRAM, *words], cwd=work, capture_output=True, text=True)
        assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr), words
    assert str(PROGRAM) in fork_server.servers


def test_what_would_be_loaded_otherwise_or_at_the_same_time_has_its_own_process(work, monkeypatch):
    run(work, "--version")
    forked = []
    monkeypatch.setattr(fork_server.ForkServer, "run", lambda self, command, *more: forked.append(command) or subprocess.CompletedProcess(command, 0, "", ""))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/set/by/an/import")
    assert run(work, "--version").stdout == "" and len(forked) == 1
    for more in ({"env": {"OMP_NUM_THREADS": "2"}}, {"env": {"LD_BIND_NOW": "1"}}, {"stdin": subprocess.DEVNULL}):
        assert run(work, "--version", **more).stdout.startswith("tierflow ")
    with fork_server.servers[str(PROGRAM)].busy:
        assert run(work, "--version").stdout.startswith("tierflow ")
    assert len(forked) == 1
