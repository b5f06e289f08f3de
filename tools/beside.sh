#!/bin/sh
# Runs a command, and another one beside it that takes the time which the first one leaves: tests mostly wait for
# processes and deadlines. The other one's output comes last. Fails where either does. beside.sh OTHER... -- COMMAND...
set -u
[ "${1-}" ] || { echo "usage: beside.sh OTHER... -- COMMAND..." >&2; exit 2; }
output=$(mktemp)
other=
trap '[ -z "$other" ] || kill "$other" 2>/dev/null; rm -f "$output"' EXIT
trap 'exit 130' INT TERM

# The words before -- become one quoted line, those behind it stay.
line=
while [ "$1" != -- ]; do
  line="$line '$(printf '%s' "$1" | sed "s/'/'\\\\''/g")'"
  shift
done
shift
eval "nice -n 19 $line" >"$output" 2>&1 &
other=$!
status=0
"$@" || status=$?
wait "$other" || status=$?
other=
cat "$output"
exit "$status"
