"""Text-valued options are parsed, and errors name the part that is wrong."""

import pytest

from jax_ppo.config import parsing


def test_points_of_a_schedule():
    assert parsing.parse_schedule("0:0.01,200:0") == ((0, 0.01), (200, 0.0))
    assert parsing.parse_schedule(" 5 : 1e-3 ") == ((5, 0.001),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "STEP:VALUE"),
        ("0.01", "STEP:VALUE"),
        ("0:0.01,", "STEP:VALUE"),
        ("1.5:2", "'1.5:2' in .* STEP:VALUE"),
        ("0:1:2", "STEP:VALUE"),
        ("0:a", "STEP:VALUE"),
        ("-1:0", "-1 .*below 0"),
        ("0:-1", "-1.0 .*finite"),
        ("0:nan", "finite"),
        ("0:inf", "finite"),
        ("5:1,5:2", "step 5 .*not come after step 5"),
        ("5:1,3:2", "step 3 .*not come after step 5"),
    ],
)
def test_an_invalid_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parsing.parse_schedule(text)


def test_projections_are_in_a_fixed_order():
    assert parsing.parse_lora_targets("v_proj, q_proj") == ("q_proj", "v_proj")
    assert len(parsing.parse_lora_targets("all-linear")) == 7
    with pytest.raises(ValueError, match="Did you mean 'q_proj'"):
        parsing.parse_lora_targets("q_prj,v_proj")
