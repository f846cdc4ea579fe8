#!/usr/bin/env bash
# Says which device a kvpoold could serve on this host, and why that one: two lines.
#   deploy/choose-device.sh KVPOOLCTL [ARGUMENT_OF_DOCTOR...]
# kvpoolctl doctor decides; without an answer of it, it is the host backend, which serves everywhere.
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
  echo "usage: deploy/choose-device.sh KVPOOLCTL [ARGUMENT_OF_DOCTOR...]" >&2
  exit 2
fi
kvpoolctl=$1
shift
# A problem that it finds is its exit status, and no reason not to listen.
document=$("$kvpoolctl" --json doctor "$@" 2>/dev/null) || true
/usr/bin/python3 -c '
import json, sys
try:
    document = json.loads(sys.argv[1])
    print(document["device"], " ".join(document["device_reason"].split()), sep="\n")
except (ValueError, KeyError):
    print("host:0", "kvpoolctl doctor says nothing about GPUs", sep="\n")
' "$document"
