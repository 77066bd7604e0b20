#!/bin/sh
# Type-check the package as it is installed. mypy does not know setuptools' package-dir, so it gets a tree of links
# in which the root folders are where they belong: llmbuild/builder, llmbuild/runtime, ...
set -eu
MYPY=${1:-mypy}
case "$MYPY" in /*) ;; */*) MYPY="$PWD/$MYPY" ;; esac # a relative path must survive the cd below
ROOT=$(cd "$(dirname "$0")/.." && pwd)
TREE=$(mktemp -d)
trap 'rm -rf "$TREE"' EXIT
mkdir "$TREE/llmbuild"
for item in "$ROOT"/llmbuild/* "$ROOT/plugins" "$ROOT/quantization" "$ROOT/builder" "$ROOT/runtime"; do
    ln -s "$item" "$TREE/llmbuild/"
done
cd "$TREE"
"$MYPY" --config-file "$ROOT/pyproject.toml" --cache-dir "$ROOT/.mypy_cache" -p llmbuild
