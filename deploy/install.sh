#!/usr/bin/env bash
# Installs raypp's server into an environment of its own. The images of deploy/Dockerfile are made by this script, too.
#
#   deploy/install.sh [--into DIR] [--device cpu|cuda] [--from SOURCE] [--system] [--dry-run]
#
#   --into DIR      where the environment goes; default: /opt/raypp
#   --device D      cpu, the default, or cuda, which adds the packages of the extra `gpu`
#   --from SOURCE   a wheel, or a clone of raypp; default: the clone that this script is in
#   --system        as root on Debian or Ubuntu: also install the packages that raypp needs from there, make the user
#                   `raypp`, and link the commands into /usr/local/bin
#   --dry-run       print the commands and run none
#
# PYTHON chooses the interpreter, 3.11 or newer; default: python3. pip's own variables hold, too. On Linux torch comes
# with CUDA, several GB, unless PIP_EXTRA_INDEX_URL names PyTorch's index of CPU builds (docs/quickstart.md, "Install").
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
into=/opt/raypp device=cpu from=$root system=false dry_run=false
python=${PYTHON:-python3}

fail() {
  echo "deploy/install.sh: $*" >&2
  exit 2
}

while (($#)); do
  case $1 in
  --into | --device | --from)
    (($# > 1)) || fail "$1 needs a value"
    declare "${1#--}=$2"
    shift 2
    ;;
  --system) system=true && shift ;;
  --dry-run) dry_run=true && shift ;;
  -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit ;;
  *) fail "unknown option $1; --help shows all" ;;
  esac
done
[[ $device == cpu || $device == cuda ]] || fail "--device is $device; expected: cpu or cuda"

$dry_run || [[ -e $from ]] || fail "--from is $from, which is not there; expected: a wheel, or a clone of raypp"

run() {
  if $dry_run; then
    printf '%q ' "$@" && echo
  else
    "$@"
  fi
}

if $system; then
  $dry_run || [[ $(id -u) == 0 ]] || fail "--system has to be run by root"
  packages=(ca-certificates curl)
  "$python" -c 'import ensurepip' 2>/dev/null || packages+=(python3 python3-venv)
  # Triton compiles a launcher for each kernel, with the headers of Python.
  [[ $device == cpu ]] || packages+=(gcc libc6-dev python3-dev)
  run apt-get update --quiet
  run env DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "${packages[@]}"
  if $dry_run || ! id raypp >/dev/null 2>&1; then
    # The number is what volumes of containers are owned by.
    run useradd --uid 10001 --user-group --home-dir /var/lib/raypp --create-home --shell /usr/sbin/nologin raypp
  fi
  # A new volume of Docker takes over its owner.
  run install --directory --owner raypp --group raypp /var/lib/raypp/huggingface
fi

$dry_run || "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$python is $("$python" --version); expected: Python 3.11 or newer; name another with PYTHON=..."

extras=serve
[[ $device == cpu ]] || extras=serve,gpu
run "$python" -m venv "$into"
run "$into/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" \
  "raypp[$extras] @ file://$(realpath --canonicalize-missing "$from")"

# What is missing shows now, and not when a server starts.
run "$into/bin/raypp" --version
run "$into/bin/python" -c 'import raypp.stage.build_stage, serve_app.app'
if [[ $device == cuda ]]; then
  run "$into/bin/python" -c 'import torch; assert torch.version.cuda, "torch is a build without CUDA"'
fi

if $system; then
  run runuser --user raypp -- "$into/bin/raypp" --version ||
    fail "the user raypp cannot run $into; is $python in a folder that others may read? PYTHON=... names another"
  for command in raypp ray serve; do
    # /usr/local/bin is on the path of login shells as well, which KubeRay starts Ray in.
    run ln --symbolic --force "$into/bin/$command" "/usr/local/bin/$command"
  done
fi
