#!/usr/bin/env bash
# Installs a build's client into an empty folder and builds a program against it, by find_package and by pkg-config.
#   consumer.sh BUILD_DIR
set -euo pipefail

build=$1
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/consumer" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
expected="libkvpool 0.1.0: disconnected"

check() {
  local said
  said=$("$1")
  if [[ $said != "$expected" ]]; then
    echo "$1 said '$said', not '$expected'" >&2
    exit 1
  fi
}

DESTDIR=$work/root cmake --install "$build/client" >/dev/null
# Moved from where it was configured to be: nothing in it may name a path of the build.
mv "$work"/root "$work"/moved
config=$(find "$work/moved" -name kvpoolConfig.cmake -printf '%h\n')
pkgconfig=$(find "$work/moved" -name kvpool.pc -printf '%h\n')
libraries=$(dirname "$pkgconfig")

cmake -S "$source" -B "$work/build" -Dkvpool_DIR="$config" >/dev/null
cmake --build "$work/build" >/dev/null
check "$work/build/consumer"
check "$work/build/consumer_static"

export PKG_CONFIG_PATH=$pkgconfig
read -r -a flags <<<"$(pkg-config --cflags --libs kvpool)"
cc -std=c11 -Wall -Wextra -Werror "$source/consumer.c" "${flags[@]}" -Wl,-rpath,"$libraries" -o "$work/by-pkg-config"
check "$work/by-pkg-config"

read -r -a flags <<<"$(pkg-config --cflags --libs --static kvpool)"
rm "$libraries"/libkvpool.so*
cc -std=c11 -Wall -Wextra -Werror "$source/consumer.c" "${flags[@]}" -o "$work/by-pkg-config-static"
check "$work/by-pkg-config-static"
echo "built and ran four consumers"
