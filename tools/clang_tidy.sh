#!/bin/sh
# Lints csrc/ with the compile database of a build folder: a group of files at once (cmake/MusterBuild.cmake), since most
# of the time goes into reading torch's headers, and one by one what is in none. What that build leaves out (the stub of a
# library that it has, what needs CUDA) is left out here. clang_tidy.sh BUILD JOBS
set -eu
build=$1 jobs=$2
units=$(find "$build/CMakeFiles/muster.dir" "$build/CMakeFiles/_C.dir" -name 'unity_*.cxx')
# Largest first.
# shellcheck disable=SC2086
{
  ls -S $units
  find csrc -name '*.cpp' | while read -r file; do
    grep -qF "/$file\"" $units || ! grep -qF "/$file\"" "$build/compile_commands.json" || echo "$file"
  done
} | xargs -P "$jobs" -n 1 clang-tidy --quiet --config-file=.clang-tidy -p "$build"
