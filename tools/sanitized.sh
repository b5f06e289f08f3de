#!/bin/sh
# Usage: sanitized.sh address|thread PROGRAM [ARGUMENTS]
# Runs a program built with MUSTER_SANITIZE. LibTorch is not instrumented, so its own reports are suppressed.
set -eu
kind=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)/tests/support
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0"
export LSAN_OPTIONS="suppressions=$here/leaks.supp:print_suppressions=0"
export TSAN_OPTIONS="suppressions=$here/races.supp:halt_on_error=0:second_deadlock_stack=1:ignore_noninstrumented_modules=1"
# libgomp's waits are invisible to the thread sanitizer.
export OMP_NUM_THREADS=1
echo "$kind sanitizer: $*"
# Newer kernels randomise more address bits than gcc 12's sanitizer runtimes can map.
if setarch "$(uname -m)" -R true 2>/dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
