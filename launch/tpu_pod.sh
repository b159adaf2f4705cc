#!/usr/bin/env bash
# Train on a Cloud TPU slice of one or more hosts. Run it on a machine where gcloud is configured.
#   launch/tpu_pod.sh create --name NAME --zone ZONE --type v5litepod-16 [--version V] [--spot]
#   launch/tpu_pod.sh setup  --name NAME --zone ZONE [--repo URL]
#   launch/tpu_pod.sh run    --name NAME --zone ZONE -- --config=... [arguments of jax_ppo.train]
#   launch/tpu_pod.sh logs   --name NAME --zone ZONE [--worker N]
#   launch/tpu_pod.sh stop   --name NAME --zone ZONE
#   launch/tpu_pod.sh delete --name NAME --zone ZONE
#
# Commands:
#   create  Create the slice.
#   setup   Copy the last commit of this checkout (or of --repo) to every host and install it
#           with .[tpu].
#   run     Start jax_ppo.train in the background on every host. Set COMMAND=sft or
#           COMMAND=reward_model in the environment to start that command instead.
#   logs    Follow the output of one host, host 0 by default.
#   stop    Send SIGTERM to the run, which saves a checkpoint and exits.
#   delete  Delete the slice and its disks. gcloud asks for confirmation.
#
# Options:
#   --version V  Software version of the hosts (default: Google's recommendation for the type).
#   --project P  Google Cloud project (default: gcloud's). Any command accepts it.
#   --spot       Create the slice from spot capacity.
#   --dry-run    Print the gcloud commands instead of running them. Any command accepts it.
#
# With several hosts, write checkpoints to a disk shared by all of them, for example a mounted
# Filestore share.
set -euo pipefail

die() {
  echo "tpu_pod.sh: $*" >&2
  exit 2
}

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"
}

# Run the arguments as a command. With --dry-run, print them quoted instead.
execute() {
  if [[ $dry_run == yes ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

tpu_vm() {
  local command=$1
  shift
  execute gcloud compute tpus tpu-vm "$command" "$@" --zone="$zone" ${project:+"--project=$project"}
}

# Run a shell command on one host or all of them: on_hosts all|NUMBER COMMAND
on_hosts() {
  tpu_vm ssh "$name" --worker="$1" --command="$2"
}

runtime_version() {
  case $type in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

create() {
  [[ -n $type ]] || die "create needs --type, for example v5litepod-16"
  tpu_vm create "$name" --accelerator-type="$type" \
    --version="${version:-$(runtime_version)}" ${spot:+--spot}
}

setup() {
  local fetch archive
  if [[ -n $repo ]]; then
    fetch="git init --quiet
    git fetch --quiet --depth 1 $(printf '%q' "$repo") HEAD
    git checkout --quiet FETCH_HEAD"
  else
    archive=$(mktemp -d)/jax_ppo.tar.gz
    execute git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    tpu_vm scp "$archive" "$name:jax_ppo.tar.gz" --worker=all
    rm -rf "$(dirname "$archive")"
    fetch='tar -xzf ../jax_ppo.tar.gz'
  fi
  # Keep the outputs of earlier runs. The hosts have Python 3.10, which JAX no longer supports, so
  # uv installs a newer one.
  on_hosts all "set -e
    mkdir -p jax_ppo && cd jax_ppo
    find . -mindepth 1 -maxdepth 1 ! -name output -exec rm -rf {} +
    $fetch
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv/bin/python -e '.[tpu]'"
}

run() {
  local arguments=''
  # Quote the arguments, because the shell of the hosts splits them again.
  (($# == 0)) || arguments=$(printf ' %q' "$@")
  on_hosts all "cd jax_ppo || exit 1
    if kill -0 \"\$(cat train.pid 2>/dev/null)\" 2>/dev/null; then
      echo 'a run is in progress: stop it first' >&2
      exit 1
    fi
    nohup .venv/bin/python -m jax_ppo.${COMMAND:-train}$arguments >train.log 2>&1 </dev/null &
    echo \$! >train.pid"
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
command=${1:-}
[[ $command =~ ^(create|setup|run|logs|stop|delete)$ ]] ||
  die "expected one of the commands in --help"
shift

name='' zone='' type='' version='' project='' repo='' spot='' worker=0 dry_run=no
while (($# > 0)); do
  case $1 in
    --name | --zone | --type | --version | --project | --repo | --worker)
      (($# > 1)) || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --spot) spot=yes; shift ;;
    --dry-run) dry_run=yes; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
[[ -n $name ]] || die "--name is missing"
[[ -n $zone ]] || die "--zone is missing"
(($# == 0)) || [[ $command == run ]] || die "only run takes arguments after --"

case $command in
  create) create ;;
  setup) setup ;;
  run) run "$@" ;;
  logs) on_hosts "$worker" 'tail -n 100 -f jax_ppo/train.log' ;;
  stop) on_hosts all "kill -TERM \"\$(cat jax_ppo/train.pid)\"" ;;
  delete) tpu_vm delete "$name" ;;
esac
