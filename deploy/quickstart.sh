#!/usr/bin/env bash
# From a fresh clone to a first session: packages, build, a daemon in a temporary directory, rows in and out of it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
keep=false
with_packages=true
gpu_start_seconds=120 # the driver may have to bring up every GPU of the host first
host_start_seconds=30

usage() {
  cat <<'END'
usage: deploy/quickstart.sh [--keep] [--no-packages] [--build-dir DIR]
  --keep           leave the daemon running at the end, and say how to talk to it
  --no-packages    install nothing: what is needed is there already, from wherever (no network, another distribution)
  --build-dir DIR  where to build (default: build/ in the source tree)
END
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --keep) keep=true ;;
    --no-packages) with_packages=false ;;
    --build-dir)
      [[ $# -ge 2 ]] || { usage >&2; exit 2; }
      mkdir -p "$2"
      build=$(cd "$2" && pwd)
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    *)
      echo "quickstart: unknown argument '$1'" >&2
      usage >&2
      exit 2
      ;;
  esac
  shift
done

heading() {
  printf '\n== %s\n' "$*"
}

# quietly LOG WHAT COMMAND...: output to a file, its end shown when the command fails
quietly() {
  local log=$1 what=$2
  shift 2
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "quickstart: $what failed; all of it is in $log" >&2
    exit 1
  fi
}

heading "packages"
if $with_packages; then
  "$root/deploy/install-deps.sh"
  echo "all there"
else
  echo "not looked at (--no-packages)"
fi

heading "build"
mkdir -p "$build"
started=$SECONDS
quietly "$build/quickstart-build.log" "the build" "$root/deploy/build.sh" "$build" -DKVPOOL_TESTS=OFF
sed -n 's/^-- kvpoold: //p' "$build/quickstart-build.log"
echo "done in $((SECONDS - started)) s: $build"

kvpoold=$build/server/supervisor/kvpoold
executor=$build/server/executor/kvpool-exec

kvpoolctl=$build/client/kvpoolctl/kvpoolctl

# A GPU where the driver, the executor and the GPU itself are good for it, else the host, and the reason.
{
  read -r device
  read -r reason
} < <("$root/deploy/choose-device.sh" "$kvpoolctl" --executor "$executor" --timeout $((gpu_start_seconds * 500)))

heading "daemon"
# A unix socket's path has 107 bytes at most; some hosts' TMPDIR leaves too few of them.
place=${TMPDIR:-/tmp}
[[ ${#place} -le 60 ]] || place=/tmp
directory=$(mktemp -d "$place/kvpoold.XXXXXX")
log=$directory/kvpoold.log
doctor=$directory/doctor.log
socket=$directory/kvpoold.sock
daemon=

stop_daemon() {
  [[ -n $daemon ]] || return 0
  kill -TERM "$daemon" 2>/dev/null || true
  local status=0
  wait "$daemon" || status=$?
  daemon=
  if [[ $status -ne 0 ]]; then
    tail -n 20 "$log" >&2
    echo "quickstart: kvpoold ended with status $status" >&2
    return 1
  fi
}

clean_up() {
  local status=$?
  stop_daemon || status=1
  if [[ $status -eq 0 ]]; then
    rm -rf "$directory"
  else
    echo "quickstart: the daemon's log is $log" >&2
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

export KVPOOLD_SOCKET=$socket
serves() {
  "$kvpoolctl" info --json 2>/dev/null | grep -q '"state": *"serving"'
}

# start_daemon DEVICE SECONDS: true when it serves. A device that can't be served ends the daemon, with the reason in its
# log; one that others have to leave first makes it wait.
start_daemon() {
  "$kvpoold" --config "$root/deploy/kvpoold.conf" --socket "$socket" --executor "$executor" --device "$1" \
    >"$log" 2>&1 </dev/null &
  daemon=$!
  local until=$((SECONDS + $2))
  while [[ $SECONDS -lt $until ]]; do
    if serves; then
      return 0
    fi
    if ! kill -0 "$daemon" 2>/dev/null; then
      wait "$daemon" || true
      daemon=
      return 1
    fi
    sleep 0.1
  done
  return 1
}

if [[ $device == cuda:* ]]; then
  if ! start_daemon "$device" "$gpu_start_seconds"; then
    # What nobody could know before an executor has opened it.
    said=$(sed -n -E 's/.* (start_failed|device_waiting) .*text="(.*)"$/\2/p' "$log" | tail -n 1)
    reason="$device can't be served: ${said:-it is not there after $gpu_start_seconds s}"
    device=host:0
    stop_daemon || true
    mv "$log" "$directory/kvpoold-gpu.log"
  fi
fi
if [[ $device == host:* ]]; then
  start_daemon "$device" "$host_start_seconds" || true
fi
"$kvpoolctl" doctor --executor "$executor" >"$doctor" 2>&1 || true
if ! serves; then
  cat "$doctor" >&2
  tail -n 20 "$log" >&2
  echo "quickstart: kvpoold does not serve $device; above is what kvpoolctl doctor says, and the daemon's log" >&2
  exit 1
fi
echo "kvpoold runs on $device ($reason)"
echo "kvpoolctl doctor: $(tail -n 1 "$doctor")"

heading "first session (client/examples/first_session.py)"
/usr/bin/python3 -B "$root/client/examples/first_session.py" "$socket"

heading "the short version (client/examples/scheduler.py)"
/usr/bin/python3 -B "$root/client/examples/scheduler.py" "$socket" main

heading "a long sequence, prefill and window (kvpoolctl walkthrough)"
"$kvpoolctl" walkthrough

heading "what the daemon holds (kvpoolctl pools)"
"$kvpoolctl" pools

if $keep; then
  trap - EXIT
  heading "the daemon goes on"
  cat <<END
socket   $socket (pool 'main' of deploy/kvpoold.conf)
log      $log
shell    export KVPOOLD_SOCKET=$socket PATH=${kvpoolctl%/*}:${kvpoold%/*}:\$PATH
look     kvpoolctl info
again    /usr/bin/python3 $root/client/examples/scheduler.py $socket main
stop     kill $daemon && rm -r $directory
END
  exit 0
fi

heading "stop"
stop_daemon
echo "kvpoold has drained and ended; nothing is left of it"
