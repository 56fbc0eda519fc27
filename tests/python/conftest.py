"""What the Python tests share: where the build is, and no network."""

import os
import pathlib
import signal
import sys
import tempfile

import pytest
from fork_server import read_when_loaded
from program import work as work  # a fixture

ROOT = pathlib.Path(__file__).parents[2]
BUILD = pathlib.Path(os.environ.get("TIERFLOW_BUILD", ROOT / "build"))

# A shell's background job ignores the first, and what nohup starts the second; tests send both, to themselves and to programs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(BUILD / "python"))  # the package, as the build makes it
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Here and in every program that a test starts: models of tests are so small that threads cost more than they save, and OpenMP's spin at
# the end of each region, beside other tests. Tests of threads set their number themselves.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
# Profiles and prepared data of tests are not the user's, and none of earlier runs. Workers share those of the process that began them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="tierflow-tests-cache-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name


def pytest_report_header():
    return f"build folder: {BUILD}"


@pytest.fixture(autouse=True)
def variables_of_programs_stay():
    """A test that leaves other ones changes what programs of later tests do, and takes these out of the fork server."""
    before = read_when_loaded(os.environ)
    yield
    assert read_when_loaded(os.environ) == before


@pytest.fixture(scope="session")
def tierflow():
    """Path of the program."""
    program = BUILD / "tierflow"
    if not program.exists():
        pytest.skip(f"{program} is not built")
    return program


@pytest.fixture
def model():
    """A small streamed Llama with everything in memory."""
    from streaming import make, roomy, tierflow

    made = tierflow.wrap(make("llama"), roomy())
    yield made
    tierflow.close(made)


@pytest.fixture
def batch():
    from streaming import batches

    return batches("llama", 1)[0]
