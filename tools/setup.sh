#!/usr/bin/env bash
# Installs what building and testing Tierflow takes: system packages through apt, and a Python environment in .venv. Quick where
# nothing is missing. PYTHON=path chooses the interpreter (3.11 or newer); arguments are further requirements files.
# With --program first, Python packages for the program alone, not for the tests; with --system no Python packages. --list-packages
# names the system packages.
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
mount|tests: file systems on loop devices
e2fsprogs|tests: the same
ca-certificates|pip downloads over TLS'
# Where no other Python serves.
python_packages='python3|runs the tests and the tokenizer
python3-venv|makes .venv'
header_packages='python3-dev|headers for the Python package'

lists=(requirements.txt requirements-test.txt)
case ${1:-} in
  --program) lists=(requirements.txt); shift ;;
  --system) lists=() ;;
  --list-packages) printf '%s\n' "$packages" "$python_packages" "$header_packages" | cut -d '|' -f 1; exit ;;
esac

python=${PYTHON:-python3}
usable_python() { "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
unusable_python() { die "$python is $("$python" --version 2>&1 || true), and Tierflow needs 3.11 or newer with the modules venv and ensurepip: install one and name it, PYTHON=path make ..."; }
if [ ! -x .venv/bin/python ] && ! usable_python; then
  [ -z "${PYTHON:-}" ] || unusable_python
  packages+=$'\n'$python_packages
  python=/usr/bin/python3  # another python3 may come first in PATH and be the one that will not do
fi

# The Python package is an extension module: it takes the headers of the interpreter that .venv has, or will have.
header_python=$python
[ ! -x .venv/bin/python ] || header_python=.venv/bin/python
"$header_python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null ||
  packages+=$'\n'$header_packages

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
      die "not root, and sudo is absent or refuses: have an administrator run \`apt-get update && apt-get install -y --no-install-recommends ${missing[*]}\`, then run the same command again"
  fi
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q)
  say "installing ${missing[*]}"
  "${apt[@]}" update || say "the package lists could not be refreshed; going on with those at hand"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}" "its own message is above; fix that, then run the same command again."
}

# torch and the libraries it brings take 5 GB, and their archives 3 GB beside them until all is unpacked.
room_for_torch() {
  local needed=9 free
  free=$(df --output=avail --block-size=1GB . | tail -n 1)
  [ "$free" -ge "$needed" ] ||
    die "$PWD has room for $free GB; PyTorch takes 5 GB and, while it is installed, $needed: free some or clone to a larger drive, then run the same command again"
}

# Installs what a requirements file lists, once for each content of the file.
python_packages() {
  local list=$1 stamp=.venv/installed-$1 wanted
  wanted=$(cksum <"$list")
  [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
  if [ "$list" = requirements.txt ] && ! .venv/bin/python -m pip show --quiet torch 2>/dev/null; then
    room_for_torch
    say "installing into .venv what $list lists (torch and the libraries it brings: a download of 3 GB or so, 5 GB on disk)"
  else
    say "installing into .venv what $list lists"
  fi
  rm -rf "$stamp" .venv/tmp
  mkdir .venv/tmp  # on the drive that was looked at: /tmp may be small
  local quiet=--quiet
  [ ! -t 1 ] || quiet=--progress-bar=on
  # --no-compile: pip would compile every module of torch and transformers; Python does so with those that are imported.
  TMPDIR=$PWD/.venv/tmp .venv/bin/python -m pip install "$quiet" --no-compile --disable-pip-version-check -r "$list" ||
    die "pip could not install what $list lists; its own message is above." \
      "Behind a proxy or a mirror, set HTTPS_PROXY or pip's own configuration, then run the same command again."
  rm -rf .venv/tmp
  printf '%s\n' "$wanted" >"$stamp"
}

python_environment() {
  local list
  if ! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    usable_python || unusable_python
    rm -rf .venv  # half made, or of a Python that is gone
    say "making .venv with $("$python" --version)"
    command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || say "no nvcc here: the build will be for the CPU device alone"
    "$python" -m venv .venv || die "$python could not make a virtual environment in $PWD/.venv; its own message is above"
  fi
  for list in "$@"; do python_packages "$list"; done
}

[ -n "${TIERFLOW_SKIP_APT:-}" ] || system_packages
[ "${1:-}" = --system ] || python_environment "${lists[@]}" "$@"
