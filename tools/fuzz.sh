#!/bin/sh
# Usage: fuzz.sh PYTHON BUILD SECONDS
# libFuzzer over what decodes bytes from other processes, instrumented with the address sanitizer. The rest is BUILD's
# library. Inputs that teach something are kept in BUILD/fuzz/inputs, a crash in BUILD/fuzz.
set -eu
python=$1
build=$(realpath "$2")
seconds=$3
cd "$(dirname "$0")/.."
if ! command -v clang++ >/dev/null; then
  echo "fuzz.sh: no clang++; install clang and its runtimes (Debian: clang, libclang-rt-14-dev)" >&2
  exit 1
fi
torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')
mkdir -p "$build/fuzz/inputs"
for source in tests/support/protocol_fuzzer csrc/server/protocol/protocol csrc/server/protocol/plan csrc/server/shard/quorum csrc/net/frame; do
  clang++ -std=c++20 -O1 -g1 -w -fsanitize=fuzzer-no-link,address -fno-omit-frame-pointer -D_GLIBCXX_USE_CXX11_ABI=1 \
    -Icsrc -Icsrc/include -I"$build/include" -Itests -isystem "$torch/include" \
    -isystem "$torch/include/torch/csrc/api/include" -c "$source.cpp" -o "$build/fuzz/$(basename $source).o"
done
clang++ -fsanitize=fuzzer,address "$build"/fuzz/*.o -L"$build/lib" -lmuster -L"$torch/lib" -ltorch_cpu -lc10 \
  -Wl,-rpath,"$build/lib" -Wl,-rpath,"$torch/lib" -o "$build/fuzz/fuzzer"
exec "$build/fuzz/fuzzer" -max_total_time="$seconds" -max_len=4096 -malloc_limit_mb=128 -rss_limit_mb=2048 \
  -artifact_prefix="$build/fuzz/" "$build/fuzz/inputs"
