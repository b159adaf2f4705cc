"""Text-valued options are parsed."""

from jax_ppo.config import parsing


def test_projections_are_in_a_fixed_order():
    assert parsing.parse_lora_targets("v_proj, q_proj") == ("q_proj", "v_proj")
    assert parsing.parse_lora_targets("all-linear") == parsing.LORA_TARGETS
