#!/usr/bin/env bash
# All benchmarks, with the hardware they ran on, and what an idle daemon costs.
#   tests/bench/run.sh [BUILD_DIR]     default: build-bench/ in the source tree, built here
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:-$root/build-bench}
idle_seconds=10

mkdir -p "$build"
if ! "$root/deploy/build.sh" "$build" -DCMAKE_BUILD_TYPE=Release >"$build/bench-build.log" 2>&1; then
  tail -n 40 "$build/bench-build.log" >&2
  echo "bench: the build failed; all of it is in $build/bench-build.log" >&2
  exit 1
fi
kvpoold=$build/server/supervisor/kvpoold
executor=$build/server/executor/kvpool-exec

directory=$(mktemp -d "${TMPDIR:-/tmp}/kvpoold-bench.XXXXXX")
daemon=
clean_up() {
  if [[ -n $daemon ]]; then
    kill -TERM "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  rm -rf "$directory"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

heading() {
  printf '\n== %s\n' "$*"
}

# Clock ticks a process has used, in user and kernel mode.
cpu_ticks() {
  sed 's/.*) //' "/proc/$1/stat" | awk '{ print $12 + $13 }'
}

heading "hardware"
date -u '+%Y-%m-%d'
lscpu | sed -n 's/^Model name: */cpu: /p'
echo "cores: $(nproc), memory: $(awk '/^MemTotal/ { printf "%.1f GiB", $2 / 1048576 }' /proc/meminfo)"
echo "load before: $(cut -d' ' -f1-3 /proc/loadavg)"

heading "host kernels (bench_host_kernels)"
"$build/tests/bench/bench_host_kernels" all 65536

heading "host index, fused-store and block ops (bench_host_ops)"
"$build/tests/bench/bench_host_ops" all

heading "planners (bench_planners)"
"$build/tests/bench/bench_planners"

heading "a step through the ring (bench_ring)"
"$build/tests/bench/bench_ring"

heading "steps of 1, 4 and 16 workers through their rings, and what one that floods costs (bench_workers)"
"$build/tests/bench/bench_workers" "$kvpoold" "$executor"

heading "calls, steps and rows through the daemon (bench_rpc)"
"$build/tests/bench/bench_rpc" "$kvpoold" "$executor"

heading "idle for $idle_seconds s, after a session"
"$kvpoold" --socket "$directory/kvpoold.sock" --executor "$executor" --log-level warning &
daemon=$!
for _ in {1..200}; do
  [[ -S $directory/kvpoold.sock ]] && break
  sleep 0.05
done
/usr/bin/python3 -B "$root/client/examples/first_session.py" "$directory/kvpoold.sock" >/dev/null
sleep 1
processes=("$daemon")
mapfile -t -O 1 processes < <(cat "/proc/$daemon/task"/*/children | tr ' ' '\n' | sed '/^$/d')
before=()
for process in "${processes[@]}"; do
  before+=("$(cpu_ticks "$process")")
done
sleep "$idle_seconds"
for index in "${!processes[@]}"; do
  process=${processes[index]}
  used=$(($(cpu_ticks "$process") - before[index]))
  awk -v name="$(cat "/proc/$process/comm")" -v ticks="$used" -v hertz="$(getconf CLK_TCK)" \
    -v seconds="$idle_seconds" 'BEGIN { printf "%-16s %.2f %% of a core\n", name, 100 * ticks / hertz / seconds }'
done
