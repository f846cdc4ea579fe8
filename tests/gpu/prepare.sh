#!/usr/bin/env bash
# Builds what tests/gpu/run.sh runs into one folder, which works on another machine too, beside a copy of this source
# tree: programs, the shared libraries they need, and the Python stubs. Needs nvcc and the packages of
# deploy/install-deps.sh --tests, but no GPU.
#   tests/gpu/prepare.sh [FOLDER] [CMAKE_ARGUMENT...]     FOLDER: build-gpu by default; built in FOLDER-work
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$root/build-gpu
if [[ $# -gt 0 && $1 == --help ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
if [[ $# -gt 0 && $1 != -* ]]; then
  folder=$(realpath -m "$1")
  shift
fi
work=$folder-work
programs=(
  server/supervisor/kvpoold server/executor/kvpool-exec client/kvpoolctl/kvpoolctl
  tests/gpu/contract_golden_cuda tests/gpu/contract_differential_cuda tests/gpu/contract_ops_golden_cuda
  tests/gpu/contract_gather_differential_cuda tests/gpu/contract_ops_differential_cuda
  tests/gpu/contract_fused_differential_cuda tests/gpu/contract_large tests/gpu/contract_population
  tests/gpu/contract_hostile tests/gpu/contract_hostile_ops tests/gpu/long_kernel
  tests/gpu/contract_replay
  tests/bench/bench_kernels tests/bench/bench_ops_cuda tests/bench/bench_replay tests/bench/bench_worker
  tests/bench/bench_workers tests/bench/bench_words tests/bench/bench_rpc
)
# The C library and the compilers' own: every system has them, and they fit that system only.
left_behind='^(linux-vdso|ld-linux|libc|libm|libmvec|libdl|libpthread|librt|libresolv|libutil|libanl|libstdc\+\+|libgcc_s)[.-]'

if ! command -v nvcc >/dev/null && [[ -z ${CUDACXX:-} && ! -x /usr/local/cuda/bin/nvcc ]]; then
  echo "tests/gpu/prepare.sh: no nvcc on PATH, in CUDACXX or in /usr/local/cuda/bin" >&2
  exit 1
fi
if ! command -v nvcc >/dev/null && [[ -z ${CUDACXX:-} ]]; then
  export CUDACXX=/usr/local/cuda/bin/nvcc
fi

library=client/libkvpool.so.0 # that the Python package loads
targets=(--target kvpool)
for program in "${programs[@]}"; do
  targets+=(--target "${program##*/}")
done
# RPATH, not RUNPATH: the libraries find each other by it too, and libkvpool, which Python loads, those beside it.
# shellcheck disable=SC2016 # $ORIGIN is the loader's
"$root/deploy/build.sh" "$work" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVPOOL_CUDA=ON -DKVPOOL_FAILPOINTS=ON \
  '-DCMAKE_BUILD_RPATH=$ORIGIN/../../lib;$ORIGIN' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
  -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--disable-new-dtags "$@" -- "${targets[@]}"

rm -rf "$folder"
mkdir -p "$folder/lib" "$folder/stubs"
copy_libraries() {
  while read -r name _ path _; do
    if [[ $path == /* && ! $name =~ $left_behind && ! -e $folder/lib/$name ]]; then
      cp -L "$path" "$folder/lib/$name"
    fi
  done < <(ldd "$1")
}
for program in "${programs[@]}"; do
  mkdir -p "$folder/${program%/*}"
  strip --strip-debug -o "$folder/$program" "$work/$program"
  copy_libraries "$work/$program"
done
cp -L "$work/$library" "$folder/lib/"
copy_libraries "$work/$library"
protoc "-I$root/proto" "--python_out=$folder/stubs" "--grpc_python_out=$folder/stubs" \
  "--plugin=protoc-gen-grpc_python=$(command -v grpc_python_plugin)" kvpool.proto
echo "failpoints=1" >"$folder/prepared"
echo "$folder: $(du -sm "$folder" | cut -f1) MiB, $(find "$folder/lib" -type f | wc -l) libraries"
