#!/bin/sh
# Builds the library and the Python module with MUSTER_CUDA=ON against a CUDA build of torch in a folder of its own,
# beside the environment that tests run in. build_cuda.sh VENV BUILD JOBS
set -eu
venv=$1 build=$2 jobs=$3
torch=$venv/cuda

PATH=$PATH:/usr/local/cuda/bin
if ! command -v nvcc >/dev/null; then
  echo "cuda: nvcc was not found; the CUDA side was not built"
  exit 0
fi
if ! cmp -s requirements-cuda.txt "$torch/.installed"; then
  rm -rf "$torch"
  # An index without these wheels (another machine type, say) is no failure of the code; a broken network is reported
  # in the same line.
  if ! log=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$torch" \
      -r requirements-cuda.txt 2>&1); then
    echo "cuda: the wheels of requirements-cuda.txt could not be installed; the CUDA side was not built:" \
      "$(printf '%s' "$log" | grep -i error | tail -n 1)"
    rm -rf "$torch"
    exit 0
  fi
  cp requirements-cuda.txt "$torch/.installed"
fi

# Release (-O3), more groups of files than processors, or more kinds of GPU, cost minutes and show nothing more: nothing of
# this build runs. A shared library links with symbols missing, unless told otherwise; the Python module misses Python's in
# any case.
cmake -S . -B "$build" -G Ninja -DMUSTER_CUDA=ON -DMUSTER_WERROR=ON -DMUSTER_PYTHON=ON -DCMAKE_CUDA_ARCHITECTURES=90-real \
  -DPython_EXECUTABLE="$(cd "$venv" && pwd)/bin/python" -DMusterTorch_ROOT="$(cd "$torch" && pwd)/torch" \
  -DMUSTER_UNITY_GROUPS="$jobs" -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" -DCMAKE_SHARED_LINKER_FLAGS=-Wl,-z,defs >"$build.log" 2>&1 ||
  { cat "$build.log"; exit 1; }
grep -e '-- CUDA' "$build.log"
cmake --build "$build" -j "$jobs" --target muster _C
echo "cuda: built and linked against torch and NCCL in $torch"
