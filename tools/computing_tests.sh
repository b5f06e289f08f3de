#!/bin/sh
# Runs the C++ tests of a build folder that compute all the time, where most others wait. computing_tests.sh BUILD
set -eu
build=$1
tools/timed.sh "tests of the CUDA side, emulated" "$build/muster_cuda_tests"
tools/timed.sh "tests of a device, emulated" "$build/muster_device_tests"
tools/timed.sh "mutants of kernels" "$build/muster_cuda_mutants" "[mutants]"
tools/timed.sh "mutants of kernels that race" tools/sanitized.sh thread "$build/muster_cuda_race_mutants" "[mutants]"
tools/timed.sh "simulated servers" "$build/muster_tests" "[simulation]~[.]"
