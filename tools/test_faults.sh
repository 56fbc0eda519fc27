#!/usr/bin/env bash
# RUNS runs of the commit protocol on simulated drives, shared by JOBS processes: tools/test_faults.sh BUILD JOBS. SEED is the first.
# The volumes' files hold their headers alone: they lie in memory where there is such a file system.
set -euo pipefail
build=$1 jobs=$2 runs=${RUNS:-100000} first=${SEED:-1}
program=$(find "$build" -name swap_test -type f -perm -u+x | head -n 1)
export TIERFLOW_TEST_DIR=${TIERFLOW_TEST_DIR:-$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)}
share=$(((runs + jobs - 1) / jobs)) status=0 pids=()
for ((job = 0; job < jobs; job++)); do
  TIERFLOW_FAULT_RUNS=$share TIERFLOW_FAULT_SEED=$((first + job * share)) "$program" --gtest_brief=1 --gtest_filter='FaultRig.Nothing*' &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
