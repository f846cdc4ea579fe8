#!/usr/bin/env bash
# Kernels are launched while the one before may still run: in the machine code of each, nothing comes before the
# instruction that waits for it that reads or writes memory which others see. The compiler may move what it is not told
# about; here is what it did.
#   tests/gpu/chained.sh CUOBJDUMP OBJECT...     objects or archives with code for compute capability 9.0
set -euo pipefail

cuobjdump=$1
shift
"$cuobjdump" -arch sm_90 -sass "$@" | awk '
  function finish() {
    if (name == "") {
      return
    }
    kernels++
    if (!waits) {
      printf "%s never waits\n", name
      failed = 1
    }
  }
  /Function :/ {
    finish()
    name = $NF ~ /empty_kernel|fault_kernel/ ? "" : $NF # these two are never launched so
    waits = name == ""
  }
  /ACQBULK/ { waits = 1 }
  !waits && /^[ \t]*\/\*[0-9a-f]+\*\/.* (LD|LDG|ST|STG|ATOM|ATOMG|RED|REDG|UBLKCP)[. ]/ {
    printf "%s does this before it waits: %s\n", name, $0
    failed = 1
  }
  END {
    finish()
    printf "%d kernels\n", kernels
    exit failed || kernels < 100
  }'
