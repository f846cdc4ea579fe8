#!/usr/bin/env bash
# Every check of the CUDA backend, on a host with a GPU, in about twelve minutes.
#   tests/gpu/run.sh [--build FOLDER] [--only STAGE,...] [--logs FOLDER] [--minutes N]
#   tests/gpu/run.sh --list
# FOLDER is what tests/gpu/prepare.sh made, here or on another machine; without it, it is made first. The GPU is the
# first one visible. KVPOOL_PYTHON: a Python with grpcio, protobuf, numpy and pytest (default: the first one found).
# Stages and what came of them are listed at the end; the last line is `N passed, N failed, N skipped`. Status 0: nothing
# failed; 1: something did; 2: there is no GPU, or the arguments are wrong.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
tests=$root/tests
stages=(smoke golden differential hostile large sanitizer daemon faults worker_memory workers worker_killed worker_user
  workers_mps worker_killed_mps worker_user_mps mps replay replay_mps bench)
optional=(ncu) # only where --only names them
declare -A limits=(
  [smoke]=60 [golden]=60 [differential]=120 [hostile]=150 [large]=150 [sanitizer]=240 [daemon]=240 [faults]=150
  [worker_memory]=120 [workers]=150 [worker_killed]=90 [worker_user]=90 [workers_mps]=150 [worker_killed_mps]=120
  [worker_user_mps]=90 [mps]=180 [replay]=150 [replay_mps]=150 [bench]=180 [ncu]=120
)
build=
only=
logs=$root/build-gpu-logs
minutes=15

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}
complain() {
  echo "tests/gpu/run.sh: $1" >&2
  exit 2
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --list)
      printf '%s\n' "${stages[@]}" "${optional[@]/%/ (only with --only)}"
      exit 0
      ;;
    --help)
      usage
      exit 0
      ;;
    --build | --only | --logs | --minutes)
      [[ $# -gt 1 ]] || complain "$1 needs a value"
      case $1 in
        --build) build=$2 ;;
        --only) only=$2 ;;
        --logs) logs=$2 ;;
        --minutes) minutes=$2 ;;
      esac
      shift 2
      ;;
    *) complain "$1 is no option; --help lists them" ;;
  esac
done
[[ $minutes =~ ^[1-9][0-9]*$ ]] || complain "--minutes '$minutes' is no number"
chosen=("${stages[@]}")
if [[ -n $only ]]; then
  IFS=, read -r -a chosen <<<"$only"
  for stage in "${chosen[@]}"; do
    [[ -n ${limits[$stage]:-} ]] || complain "there is no stage '$stage': ${stages[*]} ${optional[*]}"
  done
fi
if [[ -n $build && ! -f $build/prepared ]]; then
  complain "$build was not made by tests/gpu/prepare.sh"
fi

if [[ -d /usr/local/cuda/bin ]]; then
  PATH=$PATH:/usr/local/cuda/bin
fi
if ! command -v nvidia-smi >/dev/null; then
  echo "no GPU: there is no nvidia-smi here" >&2
  exit 2
fi
if ! gpus=$(nvidia-smi -L 2>&1) || [[ $gpus != GPU* ]]; then
  echo "no GPU: nvidia-smi -L says: $gpus" >&2
  exit 2
fi

mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
if [[ -z $build ]]; then
  build=$root/build-gpu
  echo "building into $build"
  if ! "$here/prepare.sh" "$build" >"$logs/build.log" 2>&1; then
    tail -n 30 "$logs/build.log"
    complain "the build failed: $logs/build.log"
  fi
fi
build=$(cd "$build" && pwd)
deadline=$((SECONDS + 60 * minutes - 10))

# ---- Python, MPS -----------------------------------------------------------------------------------------------------

python=
for candidate in "${KVPOOL_PYTHON:-}" python3 /usr/bin/python3; do
  if [[ -n $candidate ]] && "$candidate" -c 'import google.protobuf, grpc, numpy, pytest' 2>/dev/null; then
    python=$candidate
    break
  fi
done

mps_folder=
stop_mps() {
  if [[ -n $mps_folder ]]; then
    echo quit | CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$mps_folder timeout 30 nvidia-cuda-mps-control \
      >/dev/null 2>&1 || true
    cat "$mps_folder"/*.log >"$logs/mps-server.log" 2>/dev/null || true
    rm -rf "$mps_folder"
    mps_folder=
  fi
}
# A control daemon of our own, in folders of its own, so that nobody else's is met. start_mps OPTION...
start_mps() {
  mps_folder=$(mktemp -d /tmp/kvpool-mps-XXXXXX)
  chmod 755 "$mps_folder"
  CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$mps_folder timeout 30 nvidia-cuda-mps-control -d "$@" \
    >"$logs/mps-control.log" 2>&1 </dev/null
}
running=
finish() {
  if [[ -n $running ]]; then
    kill -TERM "$running" 2>/dev/null || true
  fi
  stop_mps
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---- what a stage may call -------------------------------------------------------------------------------------------

# Output goes to the stage's log. Tests are counted from what programs print and from JUnit files.
program() {
  echo "\$ ${*#"$build"/}"
  KVPOOL_GOLDEN_DIR=$tests/golden "$@"
}

# pytest_run NAME ENVIRONMENT... -- ARGUMENT...
pytest_run() {
  local name=$1 environment=() failpoints
  shift
  while [[ $1 != -- ]]; do
    environment+=("$1")
    shift
  done
  shift
  failpoints=$(sed -n 's/^failpoints=//p' "$build/prepared")
  env KVPOOL_TEST_DEVICE=cuda:0 "KVPOOL_BUILD_DIR=$build" "KVPOOL_STUBS=$build/stubs" \
    "KVPOOL_TEST_FAILPOINTS=$failpoints" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 "${environment[@]}" \
    "$python" -m pytest -rA -p no:cacheprovider --rootdir "$tests" -c "$tests/pytest.ini" \
    --junitxml "$logs/$name.xml" "$@"
}

# variants_ran PROGRAMS: a check for each size of kernels, which programs of tests/contract/ have as variants. What the
# stage has printed so far says how many ops each of its programs ran by which.
variants_ran() {
  awk -v programs="$1" '
    match($0, /^variant .*: [0-9]+ ops$/) {
      name = $0
      sub(/^variant /, "", name)
      sub(/: [0-9]+ ops$/, "", name)
      if (!(name in ops)) {
        names[count++] = name
      }
      ops[name] += $(NF - 1)
      ran[name] += $(NF - 1) > 0
    }
    END {
      for (i = 0; i < count; i++) {
        name = names[i]
        printf "%s %s: %d ops in %d programs of %d\n", ran[name] == programs ? "[       OK ]" : "[  FAILED  ]", name, ops[name], \
          ran[name], programs
        failed += ran[name] != programs
      }
      exit failed > 0 || count == 0
    }' "$logs/$KVPOOL_GPU_STAGE.log"
}

skip() {
  echo "SKIPPED: $1"
  exit 77
}
need_python() {
  [[ -n $python ]] || skip "no Python with grpcio, protobuf, numpy and pytest: set KVPOOL_PYTHON"
}
need_torch() {
  need_python
  "$python" -c "import torch" || skip "no torch in $python"
}

need_mps() {
  command -v nvidia-cuda-mps-control >/dev/null || skip "there is no nvidia-cuda-mps-control here"
  [[ -n ${KVPOOL_GPU_MPS:-} ]] || skip "nvidia-cuda-mps-control did not start: $(head -n 1 "$logs/mps-control.log")"
}

# ---- stages: functions in processes of their own ---------------------------------------------------------------------

stage_smoke() {
  nvidia-smi
  program "$build/server/executor/kvpool-exec" --version
  program "$build/tests/gpu/long_kernel" 0
  echo "[       OK ] a kernel runs"
  if [[ -n $python ]]; then
    pytest_run smoke -- "$here/test_executor_gpu.py" -k test_what_the_device_says
  fi
}

stage_golden() {
  program "$build/tests/gpu/contract_golden_cuda"
  program "$build/tests/gpu/contract_ops_golden_cuda"
  variants_ran 2
}

# 10,000 cases, by as many processes as there are processors for: the reference is what takes time.
stage_differential() {
  local shards=5 seed name pids=() status=0 pid
  for ((seed = 1; seed <= shards; seed++)); do
    program "$build/tests/gpu/contract_differential_cuda" $((10000 / shards)) "$seed" &
    pids+=($!)
  done
  for name in gather ops fused; do
    program "$build/tests/gpu/contract_${name}_differential_cuda" 3000 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
  done
  variants_ran "${#pids[@]}" || status=1
  return "$status"
}

stage_hostile() {
  program "$build/tests/gpu/contract_hostile"
  program "$build/tests/gpu/contract_hostile_ops"
}

stage_large() {
  program "$build/tests/gpu/contract_large"
  program "$build/tests/gpu/contract_population"
}

# The tool on a small set: not contract_large, whose regions have to be larger than 8 GiB. Its words at the end are what
# counts: a tool that can't work on a host says no summary.
sanitize() {
  local tool=$1 log=$logs/sanitizer-$1.log status=0 clean=0 command
  local commands=(
    "contract_golden_cuda" "contract_differential_cuda 200" "contract_hostile small" "contract_ops_golden_cuda"
    "contract_gather_differential_cuda 60" "contract_ops_differential_cuda 120" "contract_fused_differential_cuda 60"
    "contract_hostile_ops small" "contract_population 8192 4096" "contract_replay alone"
  )
  : >"$log"
  for command in "${commands[@]}"; do
    # shellcheck disable=SC2086 # a program and its arguments
    KVPOOL_GOLDEN_DIR=$tests/golden compute-sanitizer --tool "$tool" --error-exitcode 99 \
      "$build/tests/gpu/"$command >>"$log" 2>&1 || status=$?
    if [[ $status -ne 0 ]]; then
      break
    fi
    clean=$((clean + 1))
  done
  if [[ $status -eq 0 && $(grep -cE '(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log") -ge $clean ]]; then
    echo "[       OK ] $tool: ${#commands[@]} programs"
  elif grep -qiE 'device not supported|not supported on this|unable to (find|initialize|attach)|failed to initialize' "$log"; then
    echo "[  SKIPPED ] $tool does not work on this host: $(grep -iE -m1 'not supported|unable to|failed to' "$log")"
  else
    echo "[  FAILED  ] $tool, status $status: $log"
    tail -n 40 "$log"
    return 1
  fi
}

stage_sanitizer() {
  local tool pids=() pid status=0
  command -v compute-sanitizer >/dev/null || skip "there is no compute-sanitizer here"
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize "$tool" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
  done
  return "$status"
}

# 4,000 random steps through the daemon, where a host's suite takes 10,000: each is several calls, and the pool it wrote
# to is read back whole. What depends on the device has its 10,000 cases in stage_differential.
stage_daemon() {
  need_python
  pytest_run daemon KVPOOL_CASES=4000 -- "$tests/e2e/test_golden.py" "$tests/e2e/test_arrays.py" \
    "$tests/e2e/test_differential.py" "$tests/e2e/test_refusals.py" "$tests/e2e/test_pools.py" "$tests/e2e/test_large.py"
}

stage_faults() {
  need_python
  pytest_run faults -- "$here/test_executor_gpu.py"
}

# Memory of workers' own, by the driver: what is opened, what is refused, and what becomes of it.
stage_worker_memory() {
  need_python
  pytest_run worker_memory -- "$here/test_worker_memory_gpu.py"
}

# Workers of torch's on the same GPU; steps a second through rings, and what one over gRPC costs.
stage_workers() {
  workers_run workers
}

stage_workers_mps() {
  need_mps
  workers_run workers_mps KVPOOL_TEST_MPS=1
}

# workers_run NAME ENVIRONMENT...
workers_run() {
  local name=$1 bench
  shift
  for bench in bench_rpc bench_workers; do
    program "$build/tests/bench/$bench" "$build/server/supervisor/kvpoold" "$build/server/executor/kvpool-exec" cuda:0
  done
  need_torch
  pytest_run "$name" "$@" -- -s "$here/test_worker_gpu.py" "$here/test_worker_tensors_gpu.py"
}

# A worker that is killed in a kernel: by itself, as MPS lets nobody in before all that were on the GPU are gone, the tests
# with a context of their own as well.
stage_worker_killed() {
  need_torch
  pytest_run worker_killed -- -s "$here/test_worker_killed.py"
}

# One that is another user than the daemon.
stage_worker_user() {
  need_torch
  pytest_run worker_user -- -s "$here/test_worker_user.py"
}

stage_worker_user_mps() {
  need_mps
  need_torch
  pytest_run worker_user_mps KVPOOL_TEST_MPS=1 -- -s "$here/test_worker_user.py"
}

stage_worker_killed_mps() {
  need_mps
  need_torch
  pytest_run worker_killed_mps KVPOOL_TEST_MPS=1 -- -s "$here/test_worker_killed.py"
}

stage_mps() {
  need_python
  need_mps
  program "$build/tests/gpu/contract_golden_cuda"
  pytest_run mps KVPOOL_TEST_MPS=1 -- "$here/test_executor_gpu.py" "$tests/e2e/test_golden.py"
}

# Captured graphs whose ops the daemon does: the kernel that waits, by itself; torch's graphs; what it costs.
stage_replay() {
  program "$build/tests/gpu/contract_replay"
  program "$build/tests/gpu/contract_replay" alone
  program "$build/tests/bench/bench_words"
  program "$build/tests/bench/bench_replay"
  replay_by_daemon replay
}

stage_replay_mps() {
  need_mps
  program "$build/tests/bench/bench_words"
  replay_by_daemon replay_mps KVPOOL_TEST_MPS=1
}

# replay_by_daemon NAME ENVIRONMENT...
replay_by_daemon() {
  local name=$1
  shift
  program "$build/tests/bench/bench_worker" "$build/server/supervisor/kvpoold" "$build/server/executor/kvpool-exec"
  need_python
  pytest_run "$name" "$@" -- -s "$here/test_replay_gpu.py"
}

stage_bench() {
  program "$build/tests/bench/bench_kernels"
  program "$build/tests/bench/bench_ops_cuda"
}

# Counters of the kernels that RESULTS.md talks about.
stage_ncu() {
  command -v ncu >/dev/null || skip "there is no ncu (Nsight Compute) here"
  command -v "${python:-python3}" >/dev/null || skip "there is no python3 here"
  "${python:-python3}" "$here/counters.py" "$build"
}

# ---- running them ----------------------------------------------------------------------------------------------------

passed=0
failed=0
skipped=0
table=()

# count NAME STATUS: adds up, sets outcome.
count() {
  local name=$1 status=$2 log=$logs/$1.log ok bad=0 left suite=(0 0 0)
  ok=$(grep -cE '^\[       OK \]' "$log" || true)
  left=$(grep -cE '^\[  SKIPPED \]|^SKIPPED: ' "$log" || true)
  if [[ -s $logs/$name.xml ]]; then
    read -r -a suite < <("${python:-python3}" "$tests/tools/count.py" "$logs/$name.xml" || echo "0 1 0")
  fi
  ok=$((ok + suite[0]))
  bad=${suite[1]}
  left=$((left + suite[2]))
  if [[ $status -eq 77 && $ok -eq 0 && $bad -eq 0 ]]; then
    status=0
  elif [[ $name == bench && $status -eq 0 ]]; then
    ok=1
  fi
  if [[ $status -ne 0 && $bad -eq 0 ]]; then
    bad=1
  fi
  if [[ $((ok + bad + left)) -eq 0 ]]; then
    bad=1 # it tested nothing
  fi
  passed=$((passed + ok))
  failed=$((failed + bad))
  skipped=$((skipped + left))
  outcome="$ok passed, $bad failed, $left skipped"
  if [[ $status -eq 124 || $status -eq 137 ]]; then
    outcome+=" (stopped at its limit)"
  fi
  if [[ $bad -ne 0 ]]; then
    echo "---- end of $log"
    tail -n 40 "$log"
    echo "----"
  fi
}

run_stage() {
  local name=$1 seconds=${limits[$1]} started=$SECONDS status=0 left=$((deadline - SECONDS))
  rm -f "$logs/$name.xml"
  if [[ $left -lt 10 ]]; then
    echo "SKIPPED: no time is left of $minutes minutes" >"$logs/$name.log"
    count "$name" 0
    table+=("$(printf '%-17s %5s    %s' "$name" - "$outcome: no time was left")")
    return
  fi
  if [[ $seconds -gt $left ]]; then
    seconds=$left
  fi
  printf '%-17s ' "$name"
  # timeout runs programs, not functions: this script again, for one stage.
  env "KVPOOL_GPU_STAGE=$name" timeout --kill-after=10 "$seconds" "$BASH" "${BASH_SOURCE[0]}" --build "$build" \
    --logs "$logs" >"$logs/$name.log" 2>&1 </dev/null &
  running=$!
  wait "$running" || status=$?
  running=
  printf '%4d s  ' "$((SECONDS - started))"
  count "$name" "$status"
  echo "$outcome"
  table+=("$(printf '%-17s %4d s   %s' "$name" "$((SECONDS - started))" "$outcome")")
}

if [[ -n ${KVPOOL_GPU_STAGE:-} ]]; then
  "stage_$KVPOOL_GPU_STAGE"
  exit 0
fi

echo "$gpus"
for stage in "${chosen[@]}"; do
  if [[ $stage == mps || $stage == *_mps ]]; then
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
      run_stage "$stage"
      continue
    fi
    options=()
    if [[ $stage == worker_user_mps ]]; then
      options=(-multiuser-server)
    fi
    if start_mps "${options[@]}"; then
      export CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$mps_folder KVPOOL_GPU_MPS=1
    fi
    run_stage "$stage"
    stop_mps
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY KVPOOL_GPU_MPS
    continue
  fi
  run_stage "$stage"
done

echo
for stage in "${chosen[@]}"; do
  grep -aoE 'FIGURE .*|^SKIPPED.*|^\[  SKIPPED.*' "$logs/$stage.log" | sed "s/^/$stage: /" | sort -u || true
done
echo
printf '%s\n' "${table[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[[ $failed -eq 0 && $passed -gt 0 ]]
