#!/usr/bin/env bash
# Builds liburing from its source and installs it, for images whose packages have no liburing.a.
# A wheel links it statically. What the kernel can do is asked at run time.
set -euo pipefail

version=2.9
source=https://github.com/axboe/liburing/archive/refs/tags/liburing-$version.tar.gz

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
curl -fsSL "$source" | tar -xz -C "$directory" --strip-components 1
cd "$directory"
./configure --prefix=/usr
make -j"$(nproc)" -C src
make -C src install
