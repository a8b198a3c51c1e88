#!/usr/bin/env bash
# The loop of the grids beside this file: `train NAME OPTION...` trains one run in $root/NAME, unless it has finished.
#
# Kill it and start it again: finished runs are skipped, and the one that was under way goes on exactly where it was.
# Ctrl-C and SIGTERM let it save first (exit codes 130 and 143), a second one ends it at once. A run that fails stops no
# other, and is tried again by the next call; the exit code is then 1.
#
#   ROOT=FOLDER    where the run folders go
#   SHARD=i/n      train only every n-th run, from the i-th on, counted from 0: for several GPUs or an array of jobs
root=${ROOT:-$root}
SHARD=${SHARD:-0/1}
number=0 failed=0 stopped="" fit=""

stop() {
  stopped=$1
  if [ -n "$fit" ]; then kill -TERM "$fit" 2>/dev/null; fi
}
trap 'stop 130' INT
trap 'stop 143' TERM

train() {
  local run="$root/$1" code
  shift
  if [ $((number++ % ${SHARD#*/})) -ne "${SHARD%/*}" ] || [ -e "$run/finished" ]; then return; fi
  echo "$run"
  # In the background, as bash hears no signal while it waits for a command in the foreground.
  lit-layers fit "$@" --root "$run" --resume last &
  fit=$!
  wait "$fit" && code=0 || code=$?
  while kill -0 "$fit" 2>/dev/null; do wait "$fit" && code=0 || code=$?; done  # a signal ends `wait`, and not the run
  fit=""
  if [ "$code" -eq 0 ]; then touch "$run/finished"; else failed=$((failed + 1)); fi
  if [ -n "$stopped" ]; then exit "$stopped"; fi
}

finish() {
  if [ "$failed" -gt 0 ]; then
    echo "$failed runs failed: run the same command again to try them again" >&2
    exit 1
  fi
}
