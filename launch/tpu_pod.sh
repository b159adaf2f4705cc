#!/usr/bin/env bash
# Train on a Cloud TPU slice (v4 to v6e) of one or more hosts, from a machine with gcloud.
#   launch/tpu_pod.sh create --name NAME --zone ZONE --type v5e:4x4 [--spot] [...]
#   launch/tpu_pod.sh setup  --name NAME --zone ZONE [--repo URL]
#   launch/tpu_pod.sh start  --name NAME --zone ZONE -- --config=... [arguments of jax_ppo.train]
#   launch/tpu_pod.sh watch  --name NAME --zone ZONE [--worker N] [--recover]
#   launch/tpu_pod.sh stop   --name NAME --zone ZONE
#   launch/tpu_pod.sh resume --name NAME --zone ZONE
#   launch/tpu_pod.sh delete --name NAME --zone ZONE
#
# Commands:
#   create  Request the slice as a queued resource and wait until it is there.
#   setup   Copy the last commit of this checkout (or of --repo) to every host and install it
#           with .[tpu,gcs].
#   start   Start jax_ppo.train in the background on every host, and report a failed start with its
#           exit code and log. Set COMMAND=sft or COMMAND=reward_model in the environment to start
#           that command instead. (`run` is the same.)
#   watch   Follow the output of one host, host 0 by default, and exit with the code of the run.
#           With --recover, resume the run whenever it or its slice is preempted, until it ends.
#   stop    Send SIGTERM to the run, which saves a checkpoint, and wait until it has ended.
#   resume  Start the run again with the arguments of the last start; a slice that was preempted is
#           requested and set up again first. Only checkpoints outside of the slice survive that:
#           use --workdir=gs://... .
#   delete  Delete the slice and its boot disks without asking.
#
# Options:
#   --type T          The slice: v5e:4x4 (chips), v5e-16 or Cloud TPU's own v5litepod-16.
#   --version V       Runtime version of the hosts (default: the one documented for the type). The
#                     type is then passed to gcloud as it is.
#   --project P       Google Cloud project (default: gcloud's). Any command accepts it.
#   --spot            Request spot capacity.
#   --data-disk DISK  Attach the disk projects/P/zones/Z/disks/D and mount it at /mnt/data.
#                     Hugging Face downloads go there unless HF_HOME is set.
#   --disk-mode MODE  read-only (default; the only mode that several hosts can share) or read-write.
#   --no-wait         Let `create` return as soon as the request is queued.
#   --env NAME        Also pass this variable of your environment to the run; may be repeated.
#   --dry-run         Print the gcloud commands instead of running them. Any command accepts it.
#
# HF_HOME, HF_TOKEN and WANDB_API_KEY of your environment are passed to the run in a file that only
# you can read; they are never printed and never part of a command line. Arguments of `create` and
# `start` are remembered in ~/.local/state/jax_ppo/tpu (or under XDG_STATE_HOME) for `resume`.
#
# TPU7x is not offered by this API: see launch/gke/jobset.py. Set PYTHON to use another Python than
# python3 (3.10 or newer), which reads the type.
set -euo pipefail

POLL_SECONDS=${POLL_SECONDS:-20}
PASSED_VARIABLES=(HF_HOME HF_TOKEN WANDB_API_KEY)

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

tpus() {
  execute gcloud compute tpus "$@" --zone="$zone" ${project:+"--project=$project"}
}

# Run a shell command on one host or all of them: on_hosts all|NUMBER COMMAND
on_hosts() {
  tpus tpu-vm ssh "$name" --worker="$1" --command="$2"
}

copy_to_hosts() {
  tpus tpu-vm scp "$1" "$name:$2" --worker=all
}

# Print the state of the queued resource, ABSENT, or UNKNOWN if gcloud cannot tell.
slice_state() {
  local state errors
  errors=$(mktemp)
  state=$(gcloud compute tpus queued-resources describe "$name" --zone="$zone" \
    ${project:+"--project=$project"} --format='value(state.state)' 2>"$errors") || state=ABSENT
  if [[ $state == ABSENT ]] && ! grep -q NOT_FOUND "$errors"; then
    state=UNKNOWN
    cat "$errors" >&2
  fi
  rm -f "$errors"
  echo "$state"
}

wait_until_active() {
  local state previous=''
  [[ $dry_run == no ]] || return 0
  while :; do
    state=$(slice_state)
    [[ $state == "$previous" ]] || echo "tpu_pod.sh: $name is $state" >&2
    previous=$state
    case $state in
      ACTIVE) return 0 ;;
      FAILED | SUSPEND* | DELETING | ABSENT)
        echo "tpu_pod.sh: $name was not created; the reason is in the output of: gcloud compute" \
          "tpus queued-resources describe $name --zone=$zone" >&2
        exit 1
        ;;
    esac
    sleep "$POLL_SECONDS"
  done
}

# Remember the arguments that `resume` needs. Values of variables are not among them.
save_record() {
  [[ $dry_run == no ]] || return 0
  mkdir -p "$(dirname "$record")"
  (umask 077 && declare -p type version repo spot disk disk_mode variables run_command \
    run_arguments >"$record")
}

create() {
  local named accelerator=$type runtime=$version
  [[ -n $type ]] || die "create needs --type, for example v5e:4x4"
  # An explicit version allows for types that are newer than the table.
  if [[ -z $version ]]; then
    named=$("${PYTHON:-python3}" "$(dirname "$0")/machine_name.py" gcloud "$type") || exit 2
    read -r accelerator runtime <<<"$named"
  fi
  tpus queued-resources create "$name" --node-id="$name" --accelerator-type="$accelerator" \
    --runtime-version="$runtime" ${spot:+--spot} \
    ${disk:+"--data-disk=source=$disk,mode=$disk_mode"}
  save_record
  [[ $wait == no ]] || wait_until_active
}

setup() {
  local fetch archive
  if [[ -n $repo ]]; then
    fetch="git init --quiet
    git fetch --quiet --depth 1 $(printf '%q' "$repo") HEAD
    git checkout --quiet --force FETCH_HEAD"
  else
    archive=$(mktemp -d)/jax_ppo.tar.gz
    execute git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    copy_to_hosts "$archive" jax_ppo.tar.gz
    rm -rf "$(dirname "$archive")"
    fetch="tar -tzf ../jax_ppo.tar.gz | cut -d / -f 1 | sort -u | xargs -d '\\n' rm -rf
    tar -xzf ../jax_ppo.tar.gz"
  fi
  # Replace the checkout alone: the outputs of earlier runs stay.
  on_hosts all "set -e
    mkdir -p jax_ppo && cd jax_ppo
    if grep -qs launch/tpu_host.sh \"/proc/\$(cat train.pid 2>/dev/null)/cmdline\"; then
      echo 'a run is in progress; stop it first' >&2
      exit 3
    fi
    $fetch
    DATA_DISK_MODE=${disk:+$disk_mode} bash launch/tpu_host.sh install"
  save_record
}

# Copy the passed variables to the hosts in a file, so that no command line has their values.
send_environment() {
  local folder variable
  folder=$(mktemp -d) # only the user can enter it
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$folder'" EXIT
  for variable in "${variables[@]}"; do
    if [[ -v $variable ]]; then
      printf '%s=%q\n' "$variable" "${!variable}"
    elif [[ " ${PASSED_VARIABLES[*]} " != *" $variable "* ]]; then
      echo "tpu_pod.sh: --env $variable: not set here, so the run does not get it" >&2
    fi
  done >"$folder/jax_ppo.env"
  if [[ -n $disk && $disk_mode == read-write && ! -v HF_HOME ]]; then
    echo HF_HOME=/mnt/data/huggingface >>"$folder/jax_ppo.env"
  fi
  # scp keeps the mode of a file that exists.
  on_hosts all 'install -m 600 /dev/null jax_ppo.env'
  copy_to_hosts "$folder/jax_ppo.env" jax_ppo.env
  rm -rf "$folder"
}

start() {
  local quoted='' code=0
  # Quote the arguments, because the shell of the hosts splits them again.
  ((${#run_arguments[@]} == 0)) || quoted=$(printf ' %q' "${run_arguments[@]}")
  send_environment
  on_hosts all "cd jax_ppo && COMMAND=$run_command START_SECONDS=${START_SECONDS:-20} \
    MAX_RESTARTS=${MAX_RESTARTS:-3} bash launch/tpu_host.sh start$quoted" || code=$?
  if ((code != 0)); then
    echo "tpu_pod.sh: the run did not start: exit code $code; the log is jax_ppo/train.log on the" \
      "host named above" >&2
    # The other hosts would wait for it. Exit code 3: an earlier run is still in progress.
    ((code == 3)) || on_hosts all 'cd jax_ppo && bash launch/tpu_host.sh stop' >/dev/null 2>&1 || true
    exit "$code"
  fi
  save_record
}

watch() {
  local code state
  while :; do
    code=0
    on_hosts "$worker" 'cd jax_ppo && exec bash launch/tpu_host.sh watch' || code=$?
    if ((code == 0)) || [[ $recover == no ]]; then
      exit "$code"
    fi
    state=$(slice_state)
    if [[ $state == UNKNOWN ]]; then
      sleep "$POLL_SECONDS"
    elif [[ $state != ACTIVE ]] || ((code == 76)); then
      resume
    elif on_hosts "$worker" true >/dev/null 2>&1; then
      # The host answers, so the code came from the run, which failed or was stopped by `stop`.
      exit "$code"
    else
      sleep "$POLL_SECONDS"
    fi
  done
}

resume() {
  local state
  [[ -n $run_command ]] || die "no start of $name is recorded on this machine; use start"
  while state=$(slice_state) && [[ $state == SUSPENDING || $state == DELETING ]]; do
    sleep "$POLL_SECONDS"
  done
  case $state in
    UNKNOWN) exit 1 ;; # for gcloud's reason, which is printed
    ACTIVE)
      # The processes of other hosts may wait for the one that was lost.
      on_hosts all 'cd jax_ppo && bash launch/tpu_host.sh stop' >/dev/null 2>&1 || true
      ;;
    ABSENT | SUSPENDED | FAILED)
      echo "tpu_pod.sh: $name is $state; requesting it again" >&2
      [[ $state == ABSENT ]] || tpus queued-resources delete "$name" --force --quiet
      wait=yes
      create
      setup
      ;;
    *)
      wait_until_active
      setup
      ;;
  esac
  start
}

[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit 0; }
command=${1:-}
[[ $command =~ ^(create|setup|start|run|watch|stop|resume|delete)$ ]] ||
  die "expected one of the commands in --help"
shift

name='' zone='' type='' version='' project='' repo='' spot='' disk='' disk_mode=read-only
worker=0 recover=no wait=yes dry_run=no run_command=''
variables=("${PASSED_VARIABLES[@]}")
run_arguments=()

# Set the variables above from the options, and `arguments` to what follows --.
read_options() {
  arguments=()
  while (($# > 0)); do
    case $1 in
      --name | --zone | --type | --version | --project | --repo | --worker | --disk-mode | \
        --data-disk | --env)
        (($# > 1)) || die "$1 needs a value"
        case $1 in
          --disk-mode) disk_mode=$2 ;;
          --data-disk) disk=$2 ;;
          --env) variables+=("$2") ;;
          *) printf -v "${1#--}" %s "$2" ;;
        esac
        shift 2
        ;;
      --spot) spot=yes; shift ;;
      --recover) recover=yes; shift ;;
      --no-wait) wait=no; shift ;;
      --dry-run) dry_run=yes; shift ;;
      -h | --help) usage; exit 0 ;;
      --) arguments=("${@:2}"); return ;;
      *) die "unknown option $1; see --help" ;;
    esac
  done
}

read_options "$@"
[[ -n $name ]] || die "--name is missing"
[[ -n $zone ]] || die "--zone is missing"
record=${XDG_STATE_HOME:-$HOME/.local/state}/jax_ppo/tpu/${project:-default}.$zone.$name
if [[ $command != create && -e $record ]]; then
  # shellcheck disable=SC1090 # written by save_record
  source "$record"
  read_options "$@"
fi
[[ $disk_mode =~ ^read-(only|write)$ ]] || die "--disk-mode: expected read-only or read-write"
for variable in "${variables[@]}"; do
  # Not printed: it may be a value in the place of a name.
  [[ $variable =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "--env expects the name of a variable"
done
if [[ $command == start || $command == run ]]; then
  run_command=${COMMAND:-train}
  [[ $run_command =~ ^(train|sft|reward_model)$ ]] || die "COMMAND: expected train, sft or reward_model"
  run_arguments=("${arguments[@]}")
elif ((${#arguments[@]} > 0)); then
  die "only start takes arguments after --"
fi

case $command in
  create | setup | watch | resume) "$command" ;;
  start | run) start ;;
  stop) on_hosts all 'cd jax_ppo && bash launch/tpu_host.sh stop' ;;
  delete)
    tpus queued-resources delete "$name" --force --quiet
    execute rm -f "$record"
    ;;
esac
