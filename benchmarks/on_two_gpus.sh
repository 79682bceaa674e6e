#!/usr/bin/env bash
# What benchmarks/REPORT.md quotes of two GPUs, part by part; each ends in its time, or is ended.
#
#   benchmarks/on_two_gpus.sh OUT [PART ...]      without parts: all, some twenty minutes if all goes well
#
# OUT gets a log of every part, and its JSON report; of decode and step_overhead it is the last line of the log. Nothing
# else should run on the machine.
set -u
out=${1:?a folder for logs and reports}
shift
parts=${*:-graphs_8b graphs_06b even_8b even_06b eager_8b eager_06b speculation eagle long_prompt timeline step_overhead online bf16 text_beside_images encoder}
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

decode() { # LIMIT_S MODEL [ARGUMENT ...]
  run "$1" decode_latency.py --model "$2" --trace "$out/$part.trace.json" "${@:3}"
}

few="--runs 1"
drafts='{"method": "ngram", "num_speculative_tokens": 4, "forced_acceptance_rate": 0.7}'
for part in $parts; do
  case $part in
  graphs_8b) decode 200 qwen3-8b ;;
  graphs_06b) decode 200 qwen3-0.6b ;;
  even_8b) decode 100 qwen3-8b $few --layer-partition 18 18 ;;
  even_06b) decode 100 qwen3-0.6b $few --layer-partition 14 14 ;;
  eager_8b) decode 100 qwen3-8b $few --mode none ;;
  eager_06b) decode 100 qwen3-0.6b $few --mode none ;;
  speculation) decode 300 qwen3-8b --speculative "$drafts" ;;
  eagle) run 240 eagle.py --out "$out/$part.json" ;;
  long_prompt) run 240 long_prompt.py --out "$out/$part.json" ;;
  timeline) run 150 pipeline_timeline.py --out "$out/$part.json" --pictures "$out" ;;
  step_overhead) run 120 step_overhead.py --model qwen3-8b --requests 1 64 ;;
  online) run 240 mixed_traffic.py --model qwen3-8b --out "$out/$part.json" ;;
  bf16) run 150 bf16_agreement.py --out "$out/$part.json" ;;
  text_beside_images) run 180 text_beside_images.py --out "$out/$part.json" ;;
  encoder) run 240 encoder.py --out "$out/$part.json" ;;
  *) echo "there is no part $part" >&2 && exit 2 ;;
  esac
done
