"""The tables of a plan as text."""

from collections.abc import Sequence

from jax_ppo.memory.phases import TITLES, StepPlan

GIB = 2**30
_COLUMNS = {
    "parameters": "params",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "frozen": "frozen",
    "decoding_copy": "decoding",
    "cache": "cache",
    "batch": "batch",
    "process": "process",
    "temporaries": "temporary",
}
_PREDICTION = (
    "A prediction, not a measurement: the slowest of products, memory and links at the device's\n"
    "peak rates, all prompts and responses at their maximum lengths, no work on the host. Runs\n"
    "are slower."
)
_MOST_REMEDIES = 8
_USUAL_AXES = ("data", "fsdp", "model")


def format_plan(plan: StepPlan) -> str:
    """Return the plan as lines of text."""
    parts = [_heading(plan), _memory_table(plan), _verdict(plan)]
    if plan.fits is False:
        parts.append(_remedies(plan))
    if plan.seconds is not None:
        parts += [_time_table(plan), _PREDICTION]
    return "\n\n".join(parts)


def _heading(plan: StepPlan) -> str:
    shape = _mesh_text(plan.mesh)
    if plan.rollout_mesh != plan.mesh:
        shape += f", decoding on {_mesh_text(plan.rollout_mesh)}"
    lines = [f"{plan.topology.name}, mesh {shape}", f"temporaries: {plan.source}"]
    if _counts_process(plan):
        lines.append("programs that run at the same time count each other's gradients as temporary")
    bubbles = [f"{TITLES[x.name]} {x.bubble:.1%}" for x in plan.phases if x.bubble]
    if bubbles:
        lines.append(f"stages wait for this share of the time in the layers: {'; '.join(bubbles)}")
    return "\n".join(lines)


def _counts_process(plan: StepPlan) -> bool:
    """Return whether the process is in the memory of the device, which is then a single CPU."""
    return any(phase.memory.process for phase in plan.phases)


def _mesh_text(shape: dict[str, int]) -> str:
    # Rarely used axes are left out if they split nothing.
    shown_axes = {axis: size for axis, size in shape.items() if size > 1 or axis in _USUAL_AXES}
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes.items())


def _memory_table(plan: StepPlan) -> str:
    counts = _counts_process(plan)
    columns = {name: title for name, title in _COLUMNS.items() if counts or name != "process"}
    rows = [["GiB per device", *columns.values(), "peak"]]
    if plan.is_compiled:
        rows[0].append("by arithmetic")
    for phase in plan.phases:
        row = [TITLES[phase.name]]
        row += [_gib(getattr(phase.memory, column)) for column in columns]
        row.append(_gib(phase.memory.peak))
        if plan.is_compiled:
            row.append(_gib(phase.estimated_peak))
        rows.append(row)
    return _table(rows)


def _verdict(plan: StepPlan) -> str:
    peak = plan.peak / GIB
    if plan.available is None:
        line = f"Peak {peak:.2f} GiB per device; the memory of the devices is unknown."
    else:
        verdict = _fit_text(plan.peak, plan.available)
        line = f"Peak {peak:.2f} GiB of {plan.available / GIB:.2f} GiB per device: {verdict}."
    if plan.is_compiled:
        difference = plan.estimated_peak / plan.peak - 1
        line += f" By arithmetic {plan.estimated_peak / GIB:.2f} GiB ({difference:+.1%})."
    refused = [TITLES[phase.name] for phase in plan.phases if phase.is_refused]
    if refused:
        line += (
            f"\nThe compiler refused: {'; '.join(refused)}. Its figures may count replaced arrays "
            "twice."
        )
    return line


def _remedies(plan: StepPlan) -> str:
    assert plan.available is not None, "a plan is refused only if the memory is known"
    if not plan.remedies:
        return "No change of a single option saves memory: more devices are needed."
    lines = ["Changes that save the most (by arithmetic, GiB per device):"]
    for options, needed in plan.remedies[:_MOST_REMEDIES]:
        saved = plan.estimated_peak - needed
        verdict = _fit_text(needed, plan.available)
        lines.append(f"  {options}: {needed / GIB:.2f}, saves {saved / GIB:.2f}; {verdict}")
    return "\n".join(lines)


def _fit_text(needed: int, available: float) -> str:
    return "fits" if needed <= available else "does not fit"


def _time_table(plan: StepPlan) -> str:
    rows = [["per device", "TFLOP", "GB memory", "GB links", "seconds"]]
    for phase in plan.phases:
        work = phase.work
        figures = (work.flops / 1e12, work.memory_bytes / 1e9, work.link_bytes / 1e9, phase.seconds)
        rows.append([TITLES[phase.name], *(f"{figure:.3g}" for figure in figures)])
    seconds = plan.seconds
    assert seconds is not None, "the caller has checked"
    rows.append(["step", "", "", "", f"{seconds:.3g}"])
    return (
        f"{_table(rows)}\n\n{plan.tokens / seconds:,.0f} tokens per second, of which "
        f"{plan.response_tokens / seconds:,.0f} are sampled"
    )


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width; the first is aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
