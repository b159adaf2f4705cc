"""Plan a run: `python -m jax_ppo.plan --config=FILE --topology=v5e:2x4 [--json] [--arithmetic]`.

Prints the memory and the predicted time per device in each phase of a step. The step is compiled
for the named machine, which is not needed itself: its compiler is enough. Of the models, only
config.json is read.
"""

import json
import sys

from jax_ppo.config import command_line
from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError, exit_on_user_error
from jax_ppo.runtime import backends, topologies
from jax_ppo.runtime.topologies import Topology

USAGE = """\
usage: python -m jax_ppo.plan --config=FILE[:ARG] --topology=TYPE:SHAPE
           [--config.OPTION=VALUE ...] [--json] [--arithmetic]

--topology    {examples}
--json        print all figures as JSON
--arithmetic  estimate temporaries instead of compiling, within seconds

Prints the memory of each device in each phase of a step of `jax_ppo.train` with these options, and
a lower bound of its time. Takes the same options as jax_ppo.train.
"""


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    with exit_on_user_error():
        if {"--help", "-h", "-help"} & set(arguments[1:]):
            print(USAGE.format(examples=topologies.EXAMPLES))
            return
        config, topology, flags = read_plan_arguments(arguments)
        backends.require_settings()
        topologies.prepare_environment(topology)
        from jax_ppo.memory import step_plan

        plan = step_plan.plan_step(config, topology, compiles="--arithmetic" not in flags)
    if "--json" in flags:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print(step_plan.format_plan(plan))


def read_plan_arguments(arguments: list[str]) -> tuple[Config, Topology, set[str]]:
    """Return options, machine, --json, --arithmetic if set; raise `UserError` for wrong ones."""
    plan_flags: dict[str, str] = {}
    train_arguments = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("--topology", "--json", "--arithmetic"):
            if value and name != "--topology":
                raise UserError(f"{argument}: {name} takes no value; leave it out to turn it off")
            plan_flags[name] = value
        else:
            train_arguments.append(argument)
    if "--topology" not in plan_flags:
        raise UserError(f"--topology: must be given, for example {topologies.EXAMPLES}")
    topology = topologies.parse_topology(plan_flags.pop("--topology"))
    config, _ = command_line.read_command_line(train_arguments, "plan")
    return config, topology, set(plan_flags)


if __name__ == "__main__":
    main(sys.argv)
