"""Plays Python scripts as programs of their own, in processes that find torch, transformers and peft loaded: loading them takes longer than most
scripts of the tests."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers", "transformers.models.llama.modeling_llama", "peft"])


def _play(script, arguments, out):
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(pathlib.Path(out, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    sys.path[0] = str(pathlib.Path(script).parent)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def play(script, *arguments, timeout=180):
    """What subprocess.run() would return of `python script arguments...`, with its output as text."""
    with tempfile.TemporaryDirectory() as out:
        process = PROCESSES.Process(target=_play, args=(script, [str(word) for word in arguments], out))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(str(script), timeout)
        said = {name: pathlib.Path(out, name).read_text() for name in ("stdout", "stderr")}
    return subprocess.CompletedProcess([script, *arguments], process.exitcode, **said)
