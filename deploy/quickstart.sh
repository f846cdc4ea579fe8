#!/usr/bin/env bash
# From a fresh clone to a first session: packages, build, a daemon in a temporary directory, rows in and out of it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
keep=false

usage() {
  cat <<'END'
usage: deploy/quickstart.sh [--keep] [--build-dir DIR]
  --keep           leave the daemon running at the end, and say how to talk to it
  --build-dir DIR  where to build (default: build/ in the source tree)
END
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --keep) keep=true ;;
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
"$root/deploy/install-deps.sh"
echo "all there"

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
} < <("$root/deploy/choose-device.sh" "$kvpoolctl" --executor "$executor")

heading "daemon"
directory=$(mktemp -d "${TMPDIR:-/tmp}/kvpoold.XXXXXX")
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

# start_daemon DEVICE: true when it serves. Opening a GPU takes a moment. A device that can't be served ends the daemon,
# with the reason in its log.
start_daemon() {
  "$kvpoold" --config "$root/deploy/kvpoold.conf" --socket "$socket" --executor "$executor" --device "$1" \
    >"$log" 2>&1 </dev/null &
  daemon=$!
  for _ in {1..300}; do
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

if ! start_daemon "$device" && [[ $device == cuda:* && -z $daemon ]]; then
  # What nobody could know before an executor has opened it.
  reason="$device can't be served: $(sed -n 's/.* start_failed .*text="\(.*\)"$/\1/p' "$log" | head -n 1)"
  device=host:0
  mv "$log" "$directory/kvpoold-gpu.log"
  start_daemon "$device" || true
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
