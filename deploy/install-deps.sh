#!/usr/bin/env bash
# Installs the packages kvpoold is built and run with, from the distribution. Touches nothing when all are there.
#   deploy/install-deps.sh            build, run, and the Python first session
#   deploy/install-deps.sh --tests    what tests/run.sh needs as well
set -euo pipefail

usage() {
  echo "usage: deploy/install-deps.sh [--tests]"
}

with_tests=false
for argument in "$@"; do
  case $argument in
    --tests) with_tests=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "install-deps: unknown argument '$argument'" >&2
      usage >&2
      exit 2
      ;;
  esac
done

packages=(
  build-essential cmake ninja-build pkg-config
  libgrpc-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libuv1-dev libconfig-dev
  libjansson-dev libsmartcols-dev libncurses-dev
  python3 python3-numpy python3-grpcio python3-protobuf protobuf-compiler-grpc
)
test_packages=(
  libcmocka-dev python3-pytest python3-hypothesis grpc-proto clang clang-tidy clang-format shellcheck valgrind zsh
)

distribution=unknown
if [[ -r /etc/os-release ]]; then
  # shellcheck source=/dev/null
  distribution=$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_ID:-}")
fi
# The sanitizers' runtime is a package of clang's own version.
case $distribution in
  "debian 12") test_packages+=(libclang-rt-14-dev) ;;
  "ubuntu 24.04") test_packages+=(libclang-rt-18-dev) ;;
  *)
    {
      echo "install-deps: this is '$distribution'; known are Debian 12 and Ubuntu 24.04."
      echo "Install what these packages of theirs hold, then build with cmake (README.md):"
      echo "  ${packages[*]}"
      echo "For the tests also:"
      echo "  ${test_packages[*]} and clang's sanitizer runtime"
    } >&2
    exit 1
    ;;
esac
if $with_tests; then
  packages+=("${test_packages[@]}")
fi

is_installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps: needs root (or sudo) to install: ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

# Quiet, and everything apt said when it fails.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
as_root_quietly() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >>"$log" 2>&1
}

echo "installing ${#missing[@]} packages: ${missing[*]}"
# One list that can't be fetched (another vendor's, or no network) does not mean that these packages can't be had.
update=worked
as_root_quietly apt-get update || update=failed
if ! as_root_quietly apt-get install -y --no-install-recommends "${missing[@]}"; then
  cat "$log" >&2
  echo "install-deps: 'apt-get install -y --no-install-recommends ${missing[*]}' failed (apt-get update: $update)" >&2
  exit 1
fi
