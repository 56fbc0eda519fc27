"""Programs of the build, loaded once and forked for each run: tests/support/fork_server.cpp."""
import array
import os
import pathlib
import select
import signal
import socket
import subprocess
import threading

# Read by the loader, or by a library when it is loaded: other values take a process of their own. Not TORCHINDUCTOR_CACHE_DIR, which
# importing PEFT sets, and which LibTorch does not read.
READ_WHEN_LOADED = ("ATEN_", "CUDA", "DNNL_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTORCH_", "TBB", "TORCH_")
LONGEST = 1 << 17


def read_when_loaded(env):
    return {name: value for name, value in env.items() if name.startswith(READ_WHEN_LOADED)}


class ForkServer:
    """One program. loads: the library that it would load by itself, if any."""

    def __init__(self, program, preload, loads):
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        self.loaded_with = read_when_loaded(os.environ)
        self.busy = threading.Lock()
        settings = {"LD_PRELOAD": str(preload), "TIERFLOW_FORK_SERVER": str(theirs.fileno()), "TIERFLOW_FORK_SERVER_LOADS": str(loads or "")}
        self.process = subprocess.Popen([program], cwd="/", pass_fds=[theirs.fileno()], env={**os.environ, **settings})
        theirs.close()

    def answer(self, seconds=None):
        if not select.select([self.ours], [], [], seconds)[0]:
            raise TimeoutError
        word = self.ours.recv(4)
        assert len(word) == 4, f"the fork server ended with code {self.process.wait()}"
        return int.from_bytes(word, "little", signed=True)

    def run(self, command, cwd, timeout, env):
        """As subprocess.run() with its output as text."""
        streams = [os.open("/dev/null", os.O_RDONLY), os.memfd_create("stdout"), os.memfd_create("stderr")]
        pid = 0
        try:
            words = [str(cwd), str(len(command)), *command, *(f"{name}={value}" for name, value in env.items())]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))
            self.ours.sendmsg([b"".join(os.fsencode(word) + b"\0" for word in words)], [rights])
            pid = self.answer()
            status = self.answer(timeout)
            pid = 0
            texts = []
            for stream in streams[1:]:
                os.lseek(stream, 0, os.SEEK_SET)
                with open(stream, closefd=False) as file:
                    texts.append(file.read())
            return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), *texts)
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout) from None
        finally:
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                self.answer()
            for stream in streams:
                os.close(stream)


servers = {}


def run(command, cwd=None, timeout=None, env=None):
    """As subprocess.run(capture_output=True, text=True) of a program of the build; in a process of its own where the two could differ."""
    command, env = [str(word) for word in command], {**os.environ, **(env or {})}
    cwd = os.fspath(cwd or os.getcwd())
    build = pathlib.Path(command[0]).parent
    preload, library = build / "libfork_server.so", build / "libtierflow_train.so"
    if preload.exists() and command[0] not in servers:
        servers[command[0]] = ForkServer(command[0], preload, library if pathlib.Path(command[0]).name == "tierflow" and library.exists() else None)
    server = servers.get(command[0])
    short = sum(map(len, command)) + sum(len(name) + len(value) for name, value in env.items()) < LONGEST // 4
    if server and short and read_when_loaded(env) == server.loaded_with and server.busy.acquire(blocking=False):
        try:
            return server.run(command, cwd, timeout, env)
        finally:
            server.busy.release()
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=env)
