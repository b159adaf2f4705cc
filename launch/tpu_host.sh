#!/usr/bin/env bash
# Run jax_ppo on one host of a TPU slice. launch/tpu_pod.sh calls it on every host by ssh.
#   launch/tpu_host.sh install      Create .venv with jax_ppo[tpu,gcs], and mount the data disk, if any.
#   launch/tpu_host.sh start ARGS   Start `python -m jax_ppo.$COMMAND ARGS` in the background.
#   launch/tpu_host.sh watch        Follow the log until the run ends; exit with its code.
#   launch/tpu_host.sh stop         Send SIGTERM to the run and wait until it has saved and ended.
#   launch/tpu_host.sh supervise    Used by start: run, and restart after exit codes 143 and 130, and
#                                   MAX_RESTARTS times after the loss of a process.
#
# Files in the folder of the checkout: train.log (output), train.pid (the supervisor), train.exit
# (exit code of a run that is over) and train.stop (present once `stop` was requested). Secrets are
# read from ../jax_ppo.env, which only the user can read.
set -euo pipefail
cd "$(dirname "$0")/.."

START_SECONDS=${START_SECONDS:-20} # a run that ends earlier counts as a failed start
STOP_SECONDS=${STOP_SECONDS:-300}
MAX_RESTARTS=${MAX_RESTARTS:-3} # after the loss of a process

is_running() {
  # A zombie has no command line, and after a reboot the number is another process's.
  [[ ! -e train.exit && -s train.pid ]] &&
    grep -qs launch/tpu_host.sh "/proc/$(<train.pid)/cmdline"
}

install_package() {
  # The hosts have Python 3.10, which JAX no longer supports, so uv installs a newer one.
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --clear --python 3.12 .venv
  python3 -m uv pip install --quiet --python .venv/bin/python -e '.[tpu,gcs]'
}

mount_data_disk() {
  local device options=defaults
  [[ -n ${DATA_DISK_MODE:-} ]] || return 0
  ! mountpoint --quiet /mnt/data || return 0
  # Read-only disks may have a journal that only a writer could replay.
  [[ $DATA_DISK_MODE == read-write ]] || options=ro,noload
  # Persistent Disk appears as sdb, Hyperdisk as the second NVMe namespace.
  for device in /dev/disk/by-id/google-persistent-disk-1 /dev/sdb /dev/nvme0n2; do
    [[ -b $device ]] || continue
    sudo mkdir -p /mnt/data
    sudo mount -o "$options" "$device" /mnt/data
    return 0
  done
  echo "tpu_host.sh: $(hostname): no data disk is attached" >&2
  return 1
}

start() {
  if is_running; then
    echo "tpu_host.sh: $(hostname): a run is in progress; stop it first" >&2
    exit 3
  fi
  rm -f train.exit train.stop
  nohup bash launch/tpu_host.sh supervise "$@" >train.log 2>&1 </dev/null &
  echo $! >train.pid
  for ((tenth = 0; tenth < START_SECONDS * 10; tenth++)); do
    [[ ! -e train.exit ]] || break
    sleep 0.1
  done
  local code=0
  [[ ! -e train.exit ]] || code=$(<train.exit)
  if ((code != 0)); then
    echo "tpu_host.sh: $(hostname): the run failed to start: exit code $code; the end of its log," \
      "$PWD/train.log:" >&2
    tail -n 20 train.log >&2
  fi
  exit "$code"
}

supervise() {
  local child code losses=0
  # Exported, not passed on a command line, which other users of the host could read.
  if [[ -r ../jax_ppo.env ]]; then
    set -a
    # shellcheck disable=SC1091 # written by tpu_pod.sh
    source ../jax_ppo.env
    set +a
  fi
  # Before the run is started: the signal would otherwise end this shell and not the run.
  trap 'kill -TERM $(jobs -pr) 2>/dev/null || true' TERM
  while :; do
    .venv/bin/python -m "jax_ppo.${COMMAND:-train}" "$@" &
    child=$!
    code=0
    wait "$child" || code=$?
    # The trap interrupts `wait` while the run saves.
    while kill -0 "$child" 2>/dev/null; do
      code=0
      wait "$child" || code=$?
    done
    [[ ! -e train.stop ]] || break
    if ((code == 143 || code == 130)); then
      # The run was told to save and end, but not by `stop`: the host was about to be taken away.
      echo "tpu_host.sh: exit code $code: a signal ended the run; resuming it"
    elif ((code == 75 || code > 128)) && ((losses++ < MAX_RESTARTS)); then
      # The others, which end with 75, are started again by their hosts.
      echo "tpu_host.sh: exit code $code: a process was lost; resuming the run ($losses of" \
        "$MAX_RESTARTS)"
    else
      break
    fi
  done
  echo "$code" >train.exit.new
  mv train.exit.new train.exit
}

watch() {
  [[ -s train.pid ]] || { echo "tpu_host.sh: $(hostname): no run was started" >&2; exit 1; }
  local tail
  tail -n 100 -F train.log 2>/dev/null &
  tail=$!
  trap 'kill "$tail" 2>/dev/null || true' EXIT
  while is_running; do
    sleep 0.2
  done
  sleep 0.2 # for the last lines
  # 76: killed together with its supervisor, as by a reboot, the run left no code.
  local code=76
  [[ ! -e train.exit ]] || code=$(<train.exit)
  echo "tpu_host.sh: $(hostname): the run ended with exit code $code" >&2
  exit "$code"
}

stop() {
  touch train.stop
  if ! is_running; then
    echo "tpu_host.sh: $(hostname): no run is in progress" >&2
    return 0
  fi
  kill -TERM "$(<train.pid)"
  for ((tenth = 0; tenth < STOP_SECONDS * 10; tenth++)); do
    is_running || break
    sleep 0.1
  done
  if is_running; then
    echo "tpu_host.sh: $(hostname): the run did not end within $STOP_SECONDS s" >&2
    exit 1
  fi
  echo "tpu_host.sh: $(hostname): the run ended with exit code $(<train.exit): $(tail -n 1 train.log)"
}

case ${1:-} in
  install) install_package && mount_data_disk ;;
  start) start "${@:2}" ;;
  watch) watch ;;
  stop) stop ;;
  supervise) supervise "${@:2}" ;;
  *)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
