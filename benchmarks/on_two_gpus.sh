#!/usr/bin/env bash
# What benchmarks/REPORT.md quotes of two GPUs, part by part; each ends in its time, or is ended.
#
#   benchmarks/on_two_gpus.sh OUT [PART ...]      without parts: all, some twenty minutes if all goes well
#
# OUT gets a log of every part, and its JSON report, which is the last line of the logs of step_overhead and host_calls. Nothing else should run on the machine.
set -u
out=${1:?a folder for logs and reports}
shift
parts=${*:-graphs_8b graphs_06b others_8b others_06b speculation eagle long_prompt timeline step_overhead host_calls online bf16 text_beside_images encoder_actors encoder}
here=$(dirname "$0")
python=${PYTHON:-python3}
mkdir -p "$out"

run() { # LIMIT_S BENCHMARK [ARGUMENT ...]
  local limit=$1 begun=$SECONDS status=0
  shift
  timeout --signal=INT --kill-after=15 "$limit" "$python" "$here/$1" "${@:2}" >"$out/$part.log" 2>&1 || status=$?
  echo "$part: exit status $status after $((SECONDS - begun)) s"
  tail -n "${LINES_OF_EACH:-20}" "$out/$part.log" | cut -c1-220
}

table() { # LIMIT_S MODEL [ARGUMENT ...]
  run "$1" decode_table.py --models "$2" "${@:3}" --out "$out/$part.json"
}

for part in $parts; do
  case $part in
  graphs_8b) table 200 qwen3-8b --parts graphs start ;;
  graphs_06b) table 200 qwen3-0.6b --parts graphs start ;;
  others_8b) table 150 qwen3-8b --parts even eager --runs 1 --requests 1 16 64 256 ;;
  others_06b) table 150 qwen3-0.6b --parts even eager --runs 1 --requests 1 16 64 256 ;;
  speculation) table 300 qwen3-8b --parts speculation --requests 1 16 64 256 ;;
  eagle) run 240 eagle.py --out "$out/$part.json" ;;
  long_prompt) run 240 long_prompt.py --out "$out/$part.json" ;;
  timeline) run 150 pipeline_timeline.py --out "$out/$part.json" --pictures "$out" ;;
  step_overhead) run 120 step_overhead.py --model qwen3-8b --requests 1 64 ;;
  host_calls) run 120 step_overhead.py --model qwen3-8b --requests 1 64 --calls ;;
  online) run 240 mixed_traffic.py --model qwen3-8b --out "$out/$part.json" ;;
  bf16) run 150 bf16_agreement.py --out "$out/$part.json" ;;
  text_beside_images) run 180 text_beside_images.py --out "$out/$part.json" ;;
  encoder_actors) run 150 encoder_actors.py --out "$out/$part.json" ;;
  encoder) run 240 encoder.py --out "$out/$part.json" ;;
  *) echo "there is no part $part" >&2 && exit 2 ;;
  esac
done
