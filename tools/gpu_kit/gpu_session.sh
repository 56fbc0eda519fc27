#!/usr/bin/env bash
# Proves and measures Tierflow on a machine with an NVIDIA GPU, from this folder alone.
#   ./gpu_session.sh 0             what answers most, of all three parts, in under seven minutes
#   ./gpu_session.sh 1             inventory, contracts, kernels, streamed = resident, memcheck
#   ./gpu_session.sh 2             each lane alone; 1B streamed beside resident
#   ./gpu_session.sh 3             8B with 8,192-token and 2,048-token sequences: from memory, resident, from the drive
#   ./gpu_session.sh --rehearse 1  the same steps on a machine without a GPU, with tiny shapes on the CPU
# PYTHON=path names the Python with torch (python3), OUT=folder where results go (./kit-out), STORAGE=folder on the drive to
# measure (this folder).
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "gpu-kit: there is no $python: name a Python that has torch, PYTHON=path" >&2; exit 4; }
exec "$python" "$(dirname "$(readlink -f "$0")")/scripts/session.py" "$@"
