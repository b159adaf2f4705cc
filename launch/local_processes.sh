#!/usr/bin/env bash
# Run jax_ppo.train as several processes on this machine's CPU, connected like cluster hosts.
#   launch/local_processes.sh N -- --config=configs/... [more arguments of jax_ppo.train]
#
# Process 0 prints to the terminal; the others write to files in LOG_DIR. If a process fails, the
# other processes are stopped and its exit code is returned. SIGTERM is forwarded to all processes:
# the run saves a checkpoint and exits with code 143 (130 after SIGINT), which is then returned.
#
# Environment variables:
#   COMMAND       command to run: train (default), sft or reward_model
#   PYTHON        Python interpreter (default: python)
#   LOG_DIR       folder for the other processes' logs (default: output/local_processes)
#   MAX_RESTARTS  times that a run is started again after a process was killed (default: 0)
#   STOP_SECONDS  seconds between SIGTERM and SIGKILL when processes are stopped (default: 10)
#   XLA_FLAGS     --xla_force_host_platform_device_count=K gives each process K devices
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
if [[ ! ${1:-} =~ ^[1-9][0-9]*$ || ${2:-} != -- ]]; then
  usage >&2
  exit 2
fi
count=$1
shift 2

python=${PYTHON:-python}
log_dir=${LOG_DIR:-output/local_processes}
mkdir -p "$log_dir"
# Let the system pick a free port for the coordinator.
port=$("$python" -c '
import socket

with socket.socket() as server:
    server.bind(("localhost", 0))
    print(server.getsockname()[1])
')

declare -A running=() # operating system's process id -> number from 0 to count - 1

# shellcheck disable=SC2329 # called by the trap below
stop_all() {
  ((${#running[@]} > 0)) || return 0
  # A process that receives SIGTERM saves a checkpoint first. Kill it if that takes too long.
  kill -TERM "${!running[@]}" 2>/dev/null || true
  for ((tenth = 0; tenth < ${STOP_SECONDS:-10} * 10; tenth++)); do
    kill -0 "${!running[@]}" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL "${!running[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
}

# Read the shell's jobs, since a process that was just started may not be in `running` yet.
trap 'kill -TERM $(jobs -pr) 2>/dev/null || true' TERM
trap 'exit 130' INT
trap stop_all EXIT

export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=localhost:$port JAX_NUM_PROCESSES=$count
for ((id = 0; id < count; id++)); do
  if ((id == 0)); then
    JAX_PROCESS_ID=0 "$python" -m "jax_ppo.${COMMAND:-train}" "$@" &
  else
    JAX_PROCESS_ID=$id "$python" -m "jax_ppo.${COMMAND:-train}" "$@" \
      >"$log_dir/process_$id.log" 2>&1 &
  fi
  running[$!]=$id
done

stopped=0 # the code of processes that a signal ended after they saved
while ((${#running[@]} > 0)); do
  code=0
  wait -n -p finished "${!running[@]}" || code=$?
  # A signal to this script interrupts `wait` before any process has finished.
  [[ -n ${finished:-} ]] || continue
  id=${running[$finished]}
  unset "running[$finished]"
  if ((code == 130 || code == 143)); then
    stopped=$code
  elif ((code != 0)); then
    echo "local_processes.sh: process $id of $count ended with code $code; stopping the others" >&2
    ((id == 0)) || tail -n 20 "$log_dir/process_$id.log" >&2
    # 75: a process that lost another one; over 128: killed. An error (1) would occur again.
    if ((${MAX_RESTARTS:-0} > 0 && (code == 75 || code > 128))); then
      echo "local_processes.sh: starting the run again" >&2
      stop_all
      MAX_RESTARTS=$((MAX_RESTARTS - 1)) exec "$0" "$count" -- "$@"
    fi
    exit "$code"
  fi
done
exit "$stopped"
