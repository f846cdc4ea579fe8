#!/usr/bin/env bash
# Configures and builds: deploy/build.sh BUILD_DIR [CMAKE_ARGUMENT...] [-- BUILD_ARGUMENT...]
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
  echo "usage: deploy/build.sh BUILD_DIR [CMAKE_ARGUMENT...] [-- BUILD_ARGUMENT...]" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$1
shift
configure=()
while [[ $# -gt 0 && $1 != -- ]]; do
  configure+=("$1")
  shift
done
shift $(($# > 0 ? 1 : 0))

# A build folder keeps the generator it was made with.
[[ -f $build/CMakeCache.txt ]] || configure+=(-G Ninja)
cmake -S "$root" -B "$build" "${configure[@]}"
cmake --build "$build" -j "$(nproc)" "$@"
