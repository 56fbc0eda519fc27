#!/usr/bin/env bash
# Installs what building and testing Tierflow takes: system packages through apt, and a Python environment in .venv. Quick where
# nothing is missing. PYTHON=path chooses the interpreter (3.11 or newer); arguments are further requirements files.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

# package | what for
packages='make|the front door of this repository
g++|the C++20 compiler
cmake|configures the build
ninja-build|runs the build
pkg-config|finds liburing and xxhash
liburing-dev|io_uring: storage reads and writes
libaio-dev|the same where the kernel has or allows no io_uring
libxxhash-dev|checksums of stored state
libhwy-dev|vector instructions, chosen at run time, in the optimizer
libtbb-dev|threads that update the state
libfmt-dev|formatted text
nlohmann-json3-dev|config.json, safetensors headers, logs
libcli11-dev|the command line
libtomlplusplus-dev|settings in a TOML file
libgtest-dev|tests
libgmock-dev|tests
ca-certificates|pip downloads over TLS'

python=${PYTHON:-python3}
usable_python() { "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if [ ! -x .venv/bin/python ] && ! usable_python; then
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.11 or newer with the modules venv and ensurepip"
  packages+=$'\npython3|runs the tests and the tokenizer\npython3-venv|makes .venv'
  python=/usr/bin/python3  # another python3 may come first in PATH and be the one that will not do
fi

# The Python package is an extension module: it takes the headers of the interpreter that .venv has, or will have.
header_python=$python
[ ! -x .venv/bin/python ] || header_python=.venv/bin/python
"$header_python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null ||
  packages+=$'\npython3-dev|headers for the Python package'

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

system_packages() {
  local name purpose missing=()
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
    die "this machine has no apt. Install the equivalents of these Debian packages, then run again with TIERFLOW_SKIP_APT=1:" "$(sed 's/^/    /; s/|/: /' <<<"$packages")"
  while IFS='|' read -r name purpose; do
    installed "$name" && continue
    missing+=("$name")
    say "needs $name: $purpose"
  done <<<"$packages"
  [ ${#missing[@]} -gt 0 ] || return 0

  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
    [ -t 0 ] || as_root+=(-n)  # nobody there to type a password
    command -v sudo >/dev/null && "${as_root[@]}" -v 2>/dev/null ||
      die "no right to install packages here (not root, and sudo is absent or refuses). Ask an administrator to run:" \
        "    apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" "then run the same command again."
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q)
  say "installing ${missing[*]}"
  "${apt[@]}" update || say "the package lists could not be refreshed; going on with those at hand"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}" "its own message is above; fix that, then run the same command again."
}

# Installs what a requirements file lists, once for each content of the file.
python_packages() {
  local list=$1 stamp=.venv/installed-$1 wanted
  wanted=$(cksum <"$list")
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  say "installing into .venv what $list lists"
  [ "$list" != requirements.txt ] || say "(torch and the libraries it brings: a download of 3 GB or so, 5 GB on disk)"
  rm -f "$stamp"
  local quiet=--quiet
  [ ! -t 1 ] || quiet=--progress-bar=on
  .venv/bin/python -m pip install "$quiet" --disable-pip-version-check -r "$list" ||
    die "pip could not install what $list lists; its own message is above." \
      "Behind a proxy or a mirror, set HTTPS_PROXY or pip's own configuration, then run the same command again."
  printf '%s\n' "$wanted" >"$stamp"
}

python_environment() {
  local list
  if ! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    usable_python || die "$python is not Python 3.11 or newer with the modules venv and ensurepip; name one with PYTHON=path"
    rm -rf .venv  # half made, or of a Python that is gone
    say "making .venv with $("$python" --version)"
    command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || say "no nvcc here: the build will be for the CPU device alone"
    "$python" -m venv .venv || die "$python could not make a virtual environment in $PWD/.venv; its own message is above"
  fi
  for list in "$@"; do python_packages "$list"; done
}

[ -n "${TIERFLOW_SKIP_APT:-}" ] || system_packages
python_environment requirements.txt "$@"
