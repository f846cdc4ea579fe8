#!/usr/bin/env bash
# Every check that needs no GPU, with packages, builds and counting; tests/gpu/run.sh has the others.
#   tests/run.sh           all of it, about half an hour on 2 cores
#   tests/run.sh --quick   the build with gcc, ctest, the Python suites and the quickstart
# Logs and builds stay in build-tests/ (KVPOOL_TESTS_DIR names another folder). The last line is
# `N passed, N failed`, over the single tests of every stage; a check that is not a suite counts as one test.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
quick=false
case ${1:-} in
  "") ;;
  --quick) quick=true ;;
  *)
    echo "usage: tests/run.sh [--quick]" >&2
    exit 2
    ;;
esac

builds=${KVPOOL_TESTS_DIR:-$root/build-tests}
logs=$builds/logs
python=${KVPOOL_PYTHON:-/usr/bin/python3} # the distribution's: that is where grpcio, numpy and pytest are installed
jobs=$(nproc)
passed=0
failed=0
skipped=0
broken=()
running= # the stage's process

# ---- counting ------------------------------------------------------------------------------------------------------

finish() {
  local status=$?
  trap - EXIT
  if [[ $status -ne 0 ]]; then
    echo "tests/run.sh itself ended early with status $status"
    failed=$((failed + 1))
  fi
  echo
  if [[ ${#broken[@]} -gt 0 ]]; then
    echo "failed stages: ${broken[*]} (logs: $logs)"
  fi
  if [[ $skipped -gt 0 ]]; then
    echo "skipped: $skipped"
  fi
  echo "$passed passed, $failed failed"
  if [[ $failed -ne 0 || $passed -eq 0 ]]; then
    exit 1
  fi
  exit 0
}
# In the background, so that a signal to this script is seen at once and ends the stage with it.
interrupt() {
  if [[ -n $running ]]; then
    kill -TERM "$running" 2>/dev/null || true
    wait "$running" || true
  fi
  exit "$1"
}
trap finish EXIT
trap 'interrupt 130' INT
trap 'interrupt 143' TERM

# run NAME SECONDS COMMAND...: with a limit, output to a log. Sets run_status.
run() {
  local name=$1 seconds=$2 started=$SECONDS
  shift 2
  printf '%-24s ' "$name"
  run_status=0
  timeout --kill-after=20 "$seconds" "$@" >"$logs/$name.log" 2>&1 </dev/null &
  running=$!
  wait "$running" || run_status=$?
  running=
  printf '%4d s  ' "$((SECONDS - started))"
}

show_log() {
  broken+=("$1")
  echo "---- from $logs/$1.log"
  grep -aE 'error: |ERROR: |runtime error' "$logs/$1.log" | head -n 20 || true
  echo "---- its end"
  tail -n "${2:-30}" "$logs/$1.log" || true
  echo "----"
}

# check NAME SECONDS COMMAND...: one test. Its status is that of the function.
check() {
  run "$@"
  if [[ $run_status -eq 0 ]]; then
    passed=$((passed + 1))
    echo "ok"
    return 0
  fi
  failed=$((failed + 1))
  echo "FAILED (status $run_status)"
  show_log "$1"
  return 1
}

# suite NAME SECONDS JUNIT COMMAND...: as many tests as the JUnit file says.
suite() {
  local name=$1 seconds=$2 junit=$3 counts=("0" "0" "0")
  shift 3
  rm -f "$junit"
  run "$name" "$seconds" "$@"
  if [[ -s $junit ]]; then
    read -r -a counts < <("$python" "$root/tests/tools/count.py" "$junit" || echo "0 1 0")
  fi
  # A suite that broke off, or tested nothing, has failed whatever it counted.
  if [[ ${counts[1]} -eq 0 ]] && [[ $run_status -ne 0 || ${counts[0]} -eq 0 ]]; then
    counts[1]=1
  fi
  passed=$((passed + counts[0]))
  failed=$((failed + counts[1]))
  skipped=$((skipped + counts[2]))
  echo "${counts[0]} passed, ${counts[1]} failed, ${counts[2]} skipped"
  if [[ ${counts[1]} -ne 0 ]]; then
    show_log "$name" 60
  fi
}

# Programs of a build that are still running: told, ended, and a failure.
check_nothing_left() {
  local build=$1 left=() exe pid
  for exe in /proc/[0-9]*/exe; do
    if [[ $(readlink "$exe" 2>/dev/null) == "$build"/* ]]; then
      pid=${exe#/proc/}
      left+=("${pid%/exe}")
    fi
  done
  if [[ ${#left[@]} -eq 0 ]]; then
    passed=$((passed + 1))
    return
  fi
  failed=$((failed + 1))
  echo "still running from $build: processes ${left[*]}"
  kill -KILL "${left[@]}" 2>/dev/null || true
}

# ---- stages --------------------------------------------------------------------------------------------------------

# build NAME CMAKE_ARGUMENT...: builds everything in $builds/NAME
build() {
  local name=$1
  shift
  check "build-$name" 900 "$root/deploy/build.sh" "$builds/$name" "$@"
}

run_ctest() {
  local name=$1 seconds=$2
  suite "ctest-$name" "$seconds" "$logs/ctest-$name.xml" ctest --test-dir "$builds/$name" -j "$jobs" --timeout 300 \
    --output-on-failure --output-junit "$logs/ctest-$name.xml" --test-output-size-passed 1000000 \
    --test-output-size-failed 1000000
}

# The Python suites - end to end, faults, kvpoolctl - against the programs of a build.
run_pytest() {
  local name=$1 seconds=$2 part
  shift 2
  for part in e2e fault client; do
    suite "pytest-$part-$name" "$seconds" "$logs/pytest-$part-$name.xml" \
      env "KVPOOL_BUILD_DIR=$builds/$name" PYTHONDONTWRITEBYTECODE=1 "$@" \
      "$python" -m pytest -q -p no:cacheprovider --rootdir "$root/tests" --junitxml "$logs/pytest-$part-$name.xml" \
      "$root/tests/$part"
  done
  check_nothing_left "$builds/$name"
}

check_format() {
  local sources=()
  if [[ $(clang-format --version) != *"version 14."* ]]; then
    echo "clang-format is not version 14, whose layout the sources have: left out"
    skipped=$((skipped + 1))
    return
  fi
  mapfile -d '' -t sources < <(
    find "$root/proto" "$root/kernels" "$root/server" "$root/client" "$root/tests" \
      \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0
  )
  check clang-format 120 clang-format --dry-run -Werror "${sources[@]}" || true
}

# fuzz TARGET SECONDS: new inputs go to the build tree, the corpus is only read.
fuzz() {
  local target=$1 seconds=$2 found=$builds/fuzz/found-$1
  mkdir -p "$found"
  check "$target" $((seconds + 120)) "$builds/fuzz/tests/fuzz/$target" -max_total_time="$seconds" -timeout=10 \
    -rss_limit_mb=2048 -artifact_prefix="$builds/fuzz/$target-" "$found" "$root/tests/fuzz/corpus/${target#fuzz_}"
}

# The CUDA backend is compiled wherever nvcc is, for every architecture of a release, and its executor serves the host
# backend: one program for hosts with and without a GPU.
check_cuda() {
  local nvcc
  nvcc=$(command -v nvcc || true)
  if [[ -z $nvcc && -x /usr/local/cuda/bin/nvcc ]]; then
    nvcc=/usr/local/cuda/bin/nvcc
  fi
  if [[ -z $nvcc ]]; then
    printf '%-24s SKIPPED: no nvcc on PATH or in /usr/local/cuda/bin\n' cuda
    skipped=$((skipped + 1))
    return
  fi
  CUDACXX=$nvcc build cuda -DKVPOOL_CUDA=ON "-DKVPOOL_CUDA_ARCHITECTURES=80;90;100" -DKVPOOL_FAILPOINTS=ON -- \
    --target kvpoold --target kvpool-exec --target contract_golden_cuda --target contract_differential_cuda \
    --target contract_large --target contract_population --target contract_hostile --target long_kernel \
    --target contract_ops_golden_cuda --target contract_gather_differential_cuda \
    --target contract_ops_differential_cuda --target contract_fused_differential_cuda --target contract_hostile_ops \
    --target contract_replay --target bench_replay --target bench_worker --target bench_words --target bench_ops_cuda \
    --target bench_kernels --target fake_cuda_tests || return 0
  check clang-tidy-cuda 600 run-clang-tidy -quiet -j "$jobs" -p "$builds/cuda" \
    "^$root/(server/executor/device_cuda[a-z_]*|tests/gpu/[a-z_]*)\.c\$" || true
  suite pytest-cuda-on-host 300 "$logs/pytest-cuda-on-host.xml" env "KVPOOL_BUILD_DIR=$builds/cuda" \
    "KVPOOL_TEST_LIBRARY=$builds/gcc/client/libkvpool.so" \
    PYTHONDONTWRITEBYTECODE=1 "$python" -m pytest -q -p no:cacheprovider --rootdir "$root/tests" \
    --junitxml "$logs/pytest-cuda-on-host.xml" "$root/tests/e2e/test_golden.py" "$root/tests/e2e/test_gpu_imports.py"
  # The backend itself, on a CUDA in host memory.
  suite ctest-cuda-on-host 300 "$logs/ctest-cuda-on-host.xml" ctest --test-dir "$builds/cuda" -j "$jobs" --timeout 200 \
    -R '^unit_.*cuda' --output-on-failure --output-junit "$logs/ctest-cuda-on-host.xml"
}

mkdir -p "$logs"
export CTEST_OUTPUT_ON_FAILURE=1
# But for check_cuda the tests are about the host backend; they don't depend on a CUDA toolkit being there.
common=(-DKVPOOL_CUDA=OFF -DKVPOOL_FAILPOINTS=ON)

check packages 900 "$root/deploy/install-deps.sh" --tests || exit 0 # finish tells
if build gcc "${common[@]}" -DCMAKE_BUILD_TYPE=Release; then
  run_ctest gcc 600
  run_pytest gcc 900
fi
check quickstart 900 "$root/deploy/quickstart.sh" --build-dir "$builds/quickstart" || true
check no-failpoints 60 "$root/tests/tools/no_failpoints.sh" "$builds/quickstart" "$builds/gcc" || true
check_nothing_left "$builds"
if $quick; then
  exit 0
fi

check shellcheck 60 shellcheck "$root/.ci/run" "$root"/deploy/*.sh "$root"/tests/run.sh "$root"/tests/bench/*.sh \
  "$root"/tests/client/*.sh "$root"/tests/gpu/*.sh "$root"/tests/tools/*.sh "$root/client/kvpoolctl/completion/kvpoolctl.bash" || true
check_format

# clang: the same warnings as errors; its compile commands are what clang-tidy reads.
if build clang "${common[@]}" -DCMAKE_C_COMPILER=clang; then
  check clang-tidy 1500 run-clang-tidy -quiet -j "$jobs" -p "$builds/clang" \
    "^$root/(proto|kernels|server|client|tests)/" || true
fi

check_cuda

if build sanitized "${common[@]}" -DKVPOOL_SANITIZE=address,undefined; then
  # A small quarantine: some tests look at how much memory the daemon keeps.
  export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1
  run_ctest sanitized 600
  run_pytest sanitized 900 KVPOOL_CASES=1000 "KVPOOL_TEST_LIBRARY=$builds/gcc/client/libkvpool.so"
  unset ASAN_OPTIONS UBSAN_OPTIONS
fi

if build thread "${common[@]}" -DKVPOOL_SANITIZE=thread -- --target test_ring; then
  check ring-under-tsan 300 "$builds/thread/tests/unit/test_ring" || true
fi

# Left out: contract_exhaustive, too slow under valgrind (the sanitizers run it), and the tests on a fake
# device, whose second mapping of the same memory (mremap of size 0) valgrind doesn't know. Of the client's tests the
# library is under valgrind, the daemons it talks to are not.
if [[ -f $builds/gcc/CTestTestfile.cmake ]]; then
  suite valgrind 2400 "$logs/valgrind.xml" "$python" -B "$root/tests/tools/under_valgrind.py" "$builds/gcc" \
    "$logs/valgrind.xml" --only '^((unit|contract)_|client_(libkvpool|steps|faults|secret|permission|attach_cuda)$)' \
    --leave-out '^(contract_exhaustive|unit_executor_(launch|turns|waits|ends))$' --seconds 900
fi

if build fuzz "${common[@]}" -DCMAKE_C_COMPILER=clang -DKVPOOL_FUZZ=ON -DKVPOOL_SANITIZE=address,undefined -- \
  --target fuzz_intake --target fuzz_decode --target fuzz_ring; then
  for target in fuzz_intake fuzz_decode fuzz_ring; do
    fuzz "$target" 30 || true
  done
fi
check_nothing_left "$builds"
