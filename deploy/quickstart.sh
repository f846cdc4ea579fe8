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

# The GPU, where there is one and the executor was built for it.
device=host:0
if [[ ! -e /dev/nvidiactl ]]; then
  reason="no GPU on this machine"
elif "$executor" --help 2>&1 | grep -q '^Devices of this build:.*cuda:'; then
  device=cuda:0
  reason="a GPU, and an executor built for it"
else
  reason="there is a GPU, but no nvcc to build its backend with"
fi

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

"$kvpoold" --config "$root/deploy/kvpoold.conf" --socket "$socket" --executor "$executor" --device "$device" \
  >"$log" 2>&1 </dev/null &
daemon=$!
for _ in {1..200}; do
  [[ -S $socket ]] && break
  if ! kill -0 "$daemon" 2>/dev/null; then
    break
  fi
  sleep 0.05
done
if [[ ! -S $socket ]]; then
  tail -n 20 "$log" >&2
  echo "quickstart: kvpoold does not listen on $socket" >&2
  exit 1
fi
export KVPOOLD_SOCKET=$socket
serves() {
  "$kvpoolctl" info --json 2>/dev/null | grep -q '"state": *"serving"'
}
# Opening a GPU takes a moment. A device that can't be served ends the daemon, with the reason in its log.
for _ in {1..300}; do
  serves || ! kill -0 "$daemon" 2>/dev/null || { sleep 0.1; continue; }
  break
done
"$kvpoolctl" doctor >"$doctor" 2>&1 || true
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
