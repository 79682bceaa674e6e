#!/usr/bin/env bash
# Runs lists of commands side by side, each list on GPUs and cores of its own, one command after the other.
#
#   benchmarks/lanes.sh OUT GPUS:CORES:FILE ...       benchmarks/lanes.sh out 0,1:0-31:a.txt 2,3:32-63:b.txt
#
# A line of FILE, see benchmarks/jobs: NAME LIMIT_S COMMAND. A command that is not done after LIMIT_S seconds is ended.
# OUT gets a log of each, NAME.log; commands find $OUT, $PYTHON and the lane's GPUs as $LANE (0_1). JOBS, a regular
# expression, chooses names. Of each command its time and its last LINES_OF_EACH lines (20) are printed.
set -u
OUT=${1:?a folder for logs}
shift
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export OUT
cd "$(dirname "$0")/.." || exit 2

lane() { # GPUS CORES FILE
  export CUDA_VISIBLE_DEVICES=$1 LANE=${1//,/_} PYTHON=${PYTHON:-python3}
  export RAY_TMPDIR=${TMPDIR:-/tmp}/lane_$LANE
  mkdir -p "$RAY_TMPDIR"
  while read name limit command <&3 || [[ -n $name ]]; do # a backslash at its end continues a line
    [[ -z $name || $name == "#"* || ! ${name/\$LANE/$LANE} =~ ^(${JOBS:-.*})$ ]] && continue
    name=${name/\$LANE/$LANE}
    local begun=$SECONDS status=0
    taskset -c "$2" timeout --signal=INT --kill-after=15 "$limit" bash -c "$command" \
      >"$OUT/$name.log" 2>&1 </dev/null || status=$?
    echo "== $name: exit status $status after $((SECONDS - begun)) s"
    tail -n "${LINES_OF_EACH:-20}" "$OUT/$name.log" | cut -c1-"${WIDTH:-400}"
  done 3<"$3"
}

[ $# -gt 0 ] || set -- ""
for argument in "$@"; do
  IFS=: read -r gpus cores file <<<"$argument"
  [[ -n $gpus && -n $cores && -f $file ]] && continue
  echo "lanes.sh: no lane: '$argument'; expected: GPUS:CORES:FILE with a file that exists, e.g." \
    "0,1:0-31:benchmarks/jobs/two_gpus.txt" >&2
  exit 2
done
rm -f "$OUT"/lane_*.txt
for argument in "$@"; do
  IFS=: read -r gpus cores file <<<"$argument"
  lane "$gpus" "$cores" "$file" >"$OUT/lane_${gpus//,/_}.$(basename "$file")" &
done
wait
cat "$OUT"/lane_*.txt
