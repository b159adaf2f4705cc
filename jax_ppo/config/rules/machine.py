"""Rules of the mesh, the processes and the loggers, for every command."""

from jax_ppo.config import parsing
from jax_ppo.config.schema import (
    LOGGERS,
    Config,
    Distributed,
    MeshShape,
    Packing,
    RolloutMesh,
    Trainer,
    option_value,
)
from jax_ppo.errors import UserError, did_you_mean


def require_row_divides(packing: Packing, mesh: MeshShape) -> None:
    """Raise `UserError` unless the devices of `mesh.context` can split a packed row evenly."""
    row_length = packing.row_length
    parts = mesh.context
    # Each part has two blocks of columns.
    if row_length is not None and parts > 1 and row_length % (2 * parts):
        raise UserError(
            f"config.packing.row_length={row_length}: expected a multiple of {2 * parts}, twice "
            f"config.mesh.context={parts}, or leave it unset"
        )


def reject_router_loss_of_parts(config: Config) -> None:
    """Raise `UserError` for a router loss, a mean over sequences, if devices split sequences."""
    for name in ("actor", "critic", "supervised"):
        coef = option_value(config, f"{name}.router_aux_loss_coef")
        if coef and config.mesh.context > 1:
            raise UserError(
                f"config.{name}.router_aux_loss_coef={coef}: is computed from whole sequences, "
                f"which config.mesh.context={config.mesh.context} splits; set one of them to its "
                "default"
            )


def require_one_remaining_axis(mesh: MeshShape) -> None:
    """Raise `UserError` if several mesh axes would use the remaining devices."""
    free = [axis for axis in ("model", "fsdp", "data") if getattr(mesh, axis) == -1]
    if len(free) > 1:
        raise UserError(
            f"config.mesh.{free[0]}=-1: only one axis can be -1; set config.mesh.{free[1]}, for "
            "example to 1"
        )


def require_positive_axes(mesh: MeshShape, decoding_mesh: RolloutMesh) -> None:
    """Raise `UserError` for a mesh axis of 0 devices, which the range of the option includes."""
    for axis in ("data", "fsdp", "model"):
        if getattr(mesh, axis) == 0:
            raise UserError(f"config.mesh.{axis}=0: expected -1 or at least 1")
    if decoding_mesh.data == 0:
        raise UserError("config.rollout.mesh.data=0: expected -1 or at least 1")


def require_process_id(options: Distributed) -> None:
    """Raise `UserError` for a process whose index is not below the number of processes."""
    if options.coordinator_address and not 0 <= options.process_id < options.num_processes:
        raise UserError(
            f"config.distributed.process_id={options.process_id}: expected 0 to num_processes - "
            f"1 = {options.num_processes - 1} with config.distributed.coordinator_address set"
        )


def require_known_loggers(trainer: Trainer) -> None:
    """Raise `UserError` for a logger that does not exist."""
    text = trainer.logger
    for logger in parsing.parse_loggers(text):
        if logger not in LOGGERS:
            raise UserError(
                f"config.trainer.logger={text!r}: expected some of {', '.join(LOGGERS)}, separated "
                f"by commas.{did_you_mean(logger, LOGGERS)}"
            )
