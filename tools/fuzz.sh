#!/usr/bin/env bash
# Every parser of foreign files on random bytes: tools/fuzz.sh BUILD JOBS. MINUTES (1) for each, or RUNS inputs; PARSER names one of them.
# Begins with tests/fuzz/corpus; what it finds of use is kept in BUILD/corpus, an input that fails in BUILD/failures.
set -euo pipefail
build=$1 jobs=$2 here=$(cd "$(dirname "$0")/.." && pwd)
# The stacks of allocations, and weights by how rare a feature is, are a third of the time. An input that fails shows its stacks when it is run again:
# BUILD/fuzz_PARSER BUILD/failures/INPUT.
export ASAN_OPTIONS=${ASAN_OPTIONS:-malloc_context_size=0}
limit=-max_total_time=$((${MINUTES:-1} * 60))
[ -z "${RUNS:-}" ] || limit=-runs=$RUNS
one() {
  local parser=$1 log
  mkdir -p "$build/corpus/$parser" "$build/failures"
  log=$build/failures/$parser.log
  if "$build/fuzz_$parser" "$limit" -entropic=0 -max_len=8192 -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$build/failures/$parser-" "$build/corpus/$parser" "$here/tests/fuzz/corpus/$parser" >"$log" 2>&1; then
    echo "$parser: $(awk '/number_of_executed_units/ {print $2}' "$log") inputs, no finding"
  else
    grep -m 3 -E 'ERROR|runtime error|Test unit written' "$log" | sed "s/^/$parser: /"
    return 1
  fi
}
export -f one
export build here limit
parsers=${PARSER:-config header index manifest superblock tokens records rows teacher adapter}
printf '%s\n' $parsers | xargs -P "$jobs" -I{} bash -euo pipefail -c 'one {}'
