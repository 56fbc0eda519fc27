#!/usr/bin/env bash
# What the commit protocol survives, many times over: tools/test_faults.sh BUILD JOBS.
#   RUNS (100,000) runs on simulated drives, the first with SEED; shared by JOBS processes
#   FLIPS (10,000) single bits of a store, changed on the drive
#   CUTS (1,000) power cuts under ext4 on a loop device; needs root
#   LIMIT (1800) seconds for each of its programs: one that hangs is killed, and that is a failure
# Files lie in memory where there is such a file system.
set -euo pipefail
build=$1 jobs=$2 runs=${RUNS:-100000} first=${SEED:-1} flips=${FLIPS:-10000} cuts=${CUTS:-1000} limit=${LIMIT:-1800}
program=$(find "$build" -name swap_test -type f -perm -u+x | head -n 1)
export TIERFLOW_TEST_DIR=${TIERFLOW_TEST_DIR:-$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)}
status=0 pids=()
await() {
  for pid in "${pids[@]}"; do
    wait "$pid" || { ended=$? status=1; [ $ended != 124 ] || echo "a program hung: it was ended after $limit s" >&2; }
  done
  pids=()
}
share=$(((runs + jobs - 1) / jobs))
for ((job = 0; job < jobs; job++)); do
  TIERFLOW_FAULT_RUNS=$share TIERFLOW_FAULT_SEED=$((first + job * share)) timeout -k 10 "$limit" "$program" --gtest_brief=1 --gtest_filter='FaultRig.Nothing*' &
  pids+=($!)
done
await
TIERFLOW_CONTROL_RUNS=240 timeout -k 10 "$limit" "$program" --gtest_brief=1 --gtest_filter='FaultRig.Notices*' & pids+=($!)  # each promise broken
TIERFLOW_BIT_FLIPS=$flips timeout -k 10 "$limit" "$program" --gtest_brief=1 --gtest_filter='*BitFlips*' & pids+=($!)
TIERFLOW_POWER_CUTS=$cuts timeout -k 10 "$limit" "$program" --gtest_brief=1 --gtest_filter='PowerCutDisk*' & pids+=($!)
await
exit $status
