#!/usr/bin/env bash
# Configures and builds: deploy/build.sh BUILD_DIR [CMAKE_ARGUMENT...] [-- BUILD_ARGUMENT...]
#   KVPOOL_RELEASE=1  optimized, without the tests, and with code for every generation of GPUs that kvpoold knows
# The CUDA backend is built where nvcc is on the PATH, at $CUDACXX or in /usr/local/cuda; the host backend always.
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

# is_new_enough NVCC: of a toolkit that the CUDA backend can be built with
is_new_enough() {
  local version
  version=$("$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') || return 1
  [[ -n $version && $(printf '%s\n' 12.5 "$version" | sort -V | head -n 1) == 12.5 ]]
}

# The toolkit's installer does not put it on the PATH, where the distribution may have an older one.
own=/usr/local/cuda/bin/nvcc
if [[ -z ${CUDACXX:-} && -x $own ]] && ! is_new_enough nvcc; then
  export CUDACXX=$own
fi
if [[ ${KVPOOL_RELEASE:-0} == 1 ]]; then
  configure=(-DCMAKE_BUILD_TYPE=Release -DKVPOOL_TESTS=OFF "-DKVPOOL_CUDA_ARCHITECTURES=80;90;100" "${configure[@]}")
fi

# A build folder keeps the generator it was made with.
[[ -f $build/CMakeCache.txt ]] || configure+=(-G Ninja)
cmake -S "$root" -B "$build" "${configure[@]}"
cmake --build "$build" -j "$(nproc)" "$@"
