#!/bin/sh
# Runs a command, and another one beside it that takes the time which the first one leaves: tests mostly wait for
# processes and deadlines. The other one's output comes last. Fails where either does. beside.sh OTHER... -- COMMAND...
set -u
output=$(mktemp)
other=
trap '[ -z "$other" ] || kill -- "-$other" 2>/dev/null; rm -f "$output"' EXIT
trap 'exit 130' INT TERM

# The words before -- become one quoted line, those behind it stay.
line=
while [ "${1-}" != -- ]; do
  [ $# -gt 0 ] || { echo "usage: beside.sh OTHER... -- COMMAND..." >&2; exit 2; }
  line="$line '$(printf '%s' "$1" | sed "s/'/'\\\\''/g")'"
  shift
done
shift
# A process group of its own, so that what it has started ends with it.
eval "exec setsid nice -n 19 $line" >"$output" 2>&1 &
other=$!
status=0
"$@" || status=$?
wait "$other" || status=$?
other=
cat "$output"
exit "$status"
