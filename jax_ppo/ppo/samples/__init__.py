"""Where the samples of a step come from, one file a way, chosen once by `choose_source`."""

from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.samples.continued import ContinuedSource
from jax_ppo.ppo.samples.exact import ExactSource
from jax_ppo.ppo.samples.on_policy import GivenSource, OnPolicySource
from jax_ppo.ppo.samples.one_step_ahead import BesideUpdateSource, OneStepAheadSource
from jax_ppo.ppo.samples.selected import SelectedSource
from jax_ppo.ppo.samples.source import SampleSource
from jax_ppo.ppo.step_parts import StepParts
from jax_ppo.sampler.other_mesh import SeparateEngine


def choose_source(parts: StepParts, batches: PromptBatches) -> SampleSource:
    """Return what gives the steps their samples, from the prompts of `batches` on."""
    config = parts.config
    source: type[SampleSource] = OnPolicySource
    if isinstance(parts.training, GivenResponses):
        source = GivenSource
    elif config.rollout.max_staleness > 1:
        source = ContinuedSource
    elif config.rollout.max_staleness == 1:
        is_separate = isinstance(parts.engine, SeparateEngine)
        source = BesideUpdateSource if is_separate else OneStepAheadSource
    elif config.rollout.exact:
        source = ExactSource
    elif config.selects_samples:
        source = SelectedSource
    return source(parts, batches)
