#!/usr/bin/env bash
# Programs of a build as it is installed hold nothing of the failpoints, which a test build's do.
#   tests/tools/no_failpoints.sh BUILD TEST_BUILD
set -euo pipefail

programs=(server/supervisor/kvpoold server/executor/kvpool-exec client/libkvpool.so client/libkvpool.a)
traces=(-e KVPOOL_FAILPOINTS_FOLDER -e kvp_failpoint -e worker.step_published -e executor.step_taken -e daemon.buffer_made)

for program in "${programs[@]}"; do
  if ! grep -qaF "${traces[@]}" "$2/$program"; then
    echo "$2/$program has no failpoints: nothing would be found" >&2
    exit 1
  fi
  if grep -qaF "${traces[@]}" "$1/$program"; then
    echo "$1/$program has failpoints" >&2
    exit 1
  fi
done
