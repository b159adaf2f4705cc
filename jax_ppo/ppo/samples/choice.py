"""Choose where the samples of a run's steps come from."""

from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.ppo.samples.continued import ContinuedSource
from jax_ppo.ppo.samples.exact import ExactSource
from jax_ppo.ppo.samples.given import GivenSource
from jax_ppo.ppo.samples.on_policy import OnPolicySource
from jax_ppo.ppo.samples.one_step_ahead import BesideUpdateSource, OneStepAheadSource
from jax_ppo.ppo.samples.selected import SelectedSource
from jax_ppo.ppo.samples.source import SampleSource
from jax_ppo.ppo.step_parts import StepParts
from jax_ppo.sampler.other_mesh import SeparateEngine


def choose_source(parts: StepParts, batches: PromptBatches) -> SampleSource:
    """Return what gives the steps their samples, from the prompts of `batches` on."""
    options = parts.step_options
    if isinstance(parts.training, GivenResponses):
        return GivenSource(parts, batches)
    if options.rollout.max_staleness > 1:
        return ContinuedSource(parts, batches)
    if options.rollout.max_staleness == 1:
        is_separate = isinstance(parts.engine, SeparateEngine)
        return (BesideUpdateSource if is_separate else OneStepAheadSource)(parts, batches)
    if options.rollout.exact:
        return ExactSource(parts, batches)
    if options.selects_samples:
        return SelectedSource(parts, batches)
    return OnPolicySource(parts, batches)
