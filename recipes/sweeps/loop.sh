#!/usr/bin/env bash
# The loop of the grids in this folder: `train NAME OPTION...` trains one run in $root/NAME, unless it has finished.
#
# You can kill the loop and start it again: it skips finished runs and resumes the interrupted run exactly where it was.
# After Ctrl-C or SIGTERM the current run saves first (exit codes 130 and 143); a second signal ends it at once. A
# failed run does not stop the other runs, and the next call retries it; the exit code is then 1.
#
#   ROOT=FOLDER    parent of the run folders
#   SHARD=i/n      train only every n-th run, starting with the i-th (from 0): for several GPUs or a job array
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
  # In the background, because bash runs no trap while it waits for a command in the foreground.
  lit-layers fit "$@" --root "$run" --resume last &
  fit=$!
  wait "$fit" && code=0 || code=$?
  while kill -0 "$fit" 2>/dev/null; do wait "$fit" && code=0 || code=$?; done  # a signal ends `wait` but not the run
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
