#!/bin/sh
# Runs a command; where MUSTER_TIMES names a file, adds a line to it with the seconds that it took. timed.sh WHAT COMMAND...
set -u
what=$1
shift
begin=$(date +%s)
"$@"
status=$?
[ -z "${MUSTER_TIMES-}" ] || printf '%5d s  %s\n' "$(($(date +%s) - begin))" "$what" >>"$MUSTER_TIMES"
exit "$status"
