"""Rows with the columns of public data sets are read as what they are, or refused with a way."""

import json

import pytest

from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import GSM8K, HH_RLHF, MATH, parse_row
from jax_ppo.errors import UserError


def make_row(unread="", **values):
    """Return a row with values in these columns, and some text in those that are not read."""
    return values | dict.fromkeys(unread.split(), "x")


def expect(prompt, response=None, rejected=None, ground_truth="", data_source=""):
    """Return what a row shall be read as; "?" and a part of the message for what is refused."""
    return prompt, response, rejected, ground_truth, data_source


Q = "How many legs has a cat?"
ASK = [{"role": "user", "content": Q}]
CHAT = [*ASK, {"role": "assistant", "content": "Four."}]
WORSE = [*ASK, {"role": "assistant", "content": "Five."}]
SHARE = [{"from": "human", "value": Q}, {"from": "gpt", "value": "Four."}]
TRANSCRIPT = f"\n\nHuman: {Q}\n\nAssistant:"
BE = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]}
VERL = {"ground_truth": "4", "style": "rule"}

PREFERENCES = {
    "HuggingFaceH4/ultrafeedback_binarized": make_row(
        "prompt_id score_chosen", prompt=Q, chosen=CHAT, rejected=WORSE, messages=CHAT
    ),
    "trl-lib/ultrafeedback_binarized": make_row("score_chosen", chosen=CHAT, rejected=WORSE),
    "argilla/distilabel-intel-orca-dpo-pairs": make_row(
        "rating status", system="", input=Q, chosen="Four.", rejected="Five."
    ),
}
PROMPTS = {
    "openbmb/UltraFeedback": make_row("source models completions correct_answers", instruction=Q),
    "Salesforce/xlam-function-calling-60k": make_row(
        "id answers", query=Q, tools='[{"name": "count"}]'
    ),
}
REFUSED = {
    "HuggingFaceH4/ultrachat_200k": make_row(
        "prompt_id", prompt=Q, messages=[*CHAT, {"role": "user", "content": "And a dog?"}, CHAT[1]]
    ),
    "google-research-datasets/mbpp": make_row("task_id text code"),
    "deepmind/aqua_rat": make_row("rationale correct", question=Q, options=["A)4"]),
    "glaiveai/glaive-function-calling-v2": make_row("chat", system="SYSTEM: x"),
}
ANSWERS = {
    "allenai/tulu-3-sft-mixture": make_row("id source", messages=CHAT),
    "databricks/databricks-dolly-15k": make_row(
        "category", instruction=Q, context="", response="Four."
    ),
    "teknium/OpenHermes-2.5": make_row("source idx", conversations=SHARE, system_prompt=None),
    "trl-lib/kto-mix-14k": make_row(prompt=ASK, completion=CHAT[1:], label=True),
    "lmsys/chat with other roles": make_row(
        conversation=[{"role": "human", "content": Q}, {"role": "gpt", "content": "Four."}]
    ),
}
LAYOUTS = {
    **{name: (row, expect(ASK, "Four.", "Five.")) for name, row in PREFERENCES.items()},
    **{name: (row, expect(ASK)) for name, row in PROMPTS.items()},
    **{name: (row, expect("?data.prompt_key")) for name, row in REFUSED.items()},
    **{name: (row, expect(ASK, "Four.")) for name, row in ANSWERS.items()},
    "openai/gsm8k": (
        make_row(question=Q, answer="Legs.\n#### 4"),
        expect(ASK, "Legs.\n#### 4", None, "4", GSM8K),
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        make_row(
            "source_prompt ability",
            **{"prompt": Q, "solution": "4", "data_source": "math_dapo", "reward_model": VERL},
        ),
        expect(Q, "4", None, "4", "math_dapo"),
    ),
    "AI-MO/NuminaMath-CoT": (
        make_row(
            "source",
            problem=Q,
            solution=r"\boxed{4}",
            messages=[*ASK, {"role": "assistant", "content": r"\boxed{4}"}],
        ),
        expect(ASK, r"\boxed{4}", None, r"\boxed{4}", MATH),
    ),
    "open-r1/OpenR1-Math-220k": (
        make_row(
            "problem_type uuid generations", problem=Q, solution="S", answer="4", messages=CHAT
        ),
        expect(ASK, "?supervised.response_key", None, "4", MATH),
    ),
    "Anthropic/hh-rlhf": (
        make_row(chosen=TRANSCRIPT + " Four.", rejected=TRANSCRIPT + " Five."),
        expect(TRANSCRIPT, " Four.", " Five.", "", HH_RLHF),
    ),
    "Dahoas/full-hh-rlhf": (
        make_row(prompt=TRANSCRIPT, response=" Four.", chosen=" Four.", rejected=" Five."),
        expect(TRANSCRIPT, " Four.", " Five."),
    ),
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": (
        make_row("dataset", messages=ASK, ground_truth="4", constraint=None),
        expect(ASK, ground_truth="4"),
    ),
    "zwhe99/DeepMath-103K": (
        make_row("topic r1_solution_1", question=Q, final_answer="4"),
        expect(ASK, ground_truth="4"),
    ),
    "tatsu-lab/alpaca": (
        make_row("text", instruction="Count.", input=Q, output="Four."),
        expect([{"role": "user", "content": f"Count.\n\n{Q}"}], "Four."),
    ),
    "Open-Orca/OpenOrca": (
        make_row("id", system_prompt="Be brief.", question=Q, response="Four."),
        expect([BE, *ASK], "Four."),
    ),
    "open-thoughts/OpenThoughts-114k": (
        make_row(system="Be brief.", conversations=SHARE),
        expect([BE, *ASK], "Four."),
    ),
    "Intel/orca_dpo_pairs": (
        make_row(system="Be brief.", question=Q, chosen="Four.", rejected="Five."),
        expect([BE, *ASK], "Four.", "Five."),
    ),
    "Maxwell-Jia/AIME_2024": (
        make_row(ID="2024-I-1", Problem=Q, Solution="S", Answer=4),
        expect(ASK, "S", None, "4", MATH),
    ),
    "SynthLabsAI/Big-Math-RL-Verified": (
        make_row("source domain llama8b_solve_rate", problem=Q, answer="4"),
        expect(ASK, "4", None, "4", MATH),
    ),
    "nvidia/OpenMathReasoning": (
        make_row("generated_solution problem_type", problem=Q, expected_answer="4"),
        expect(ASK, None, None, "4", MATH),
    ),
    "trl-lib/tldr": (
        make_row(prompt="POST: x TL;DR:", completion=" short"),
        expect("POST: x TL;DR:", " short"),
    ),
    "rajpurkar/squad": (
        make_row("id title answers", context="Cats have four.", question=Q),
        expect([{"role": "user", "content": f"{Q}\n\nCats have four."}]),
    ),
    "simplescaling/s1K": (
        make_row("cot_type source_type thinking_trajectories", solution="4", question=Q, cot=None),
        expect(ASK, "4"),
    ),
    "PKU-Alignment/PKU-SafeRLHF": (
        make_row("response_0 response_1 better_response_id", prompt=Q),
        expect(Q),
    ),
    "PeterJinGo/nq_hotpotqa_train": (
        make_row(
            "id golden_answers ability",
            question=Q,
            prompt=ASK,
            data_source="searchR1_nq",
            reward_model={"ground_truth": {"target": ["4"]}},
        ),
        expect(ASK, ground_truth={"target": ["4"]}, data_source="searchR1_nq"),
    ),
    "GAIR/lima": (
        make_row("source", conversations=[Q, "Four."]),
        expect("?must have role and content"),
    ),
    "m-a-p/CodeFeedback": (
        make_row("resource lang", query=Q, answer="Four."),
        expect(ASK, "Four.", ground_truth="Four."),
    ),
    "PRIME-RL/Eurus-2-RL-Data": (
        make_row("ability", prompt=[BE, *ASK], data_source="numina_olympiads", reward_model=VERL),
        expect([BE, *ASK], ground_truth="4", data_source="numina_olympiads"),
    ),
    "Toucan": (
        make_row(messages=json.dumps([*ASK, CALL]), tools='[{"name": "count"}]'),
        expect(ASK, "?tool_calls of the last message of messages is not learned"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_layout_is_read_as_what_it_is_or_refused_with_the_way(name):
    row, (prompt, response, rejected, ground_truth, data_source) = LAYOUTS[name]
    for columns in (Columns(reads_responses=False), Columns()):
        refusal = prompt if str(prompt)[:1] == "?" else response
        if str(refusal)[:1] == "?" and (columns.reads_responses or refusal == prompt):
            with pytest.raises(UserError, match=refusal[1:]):
                parse_row(row, "here", columns)
            continue
        example = parse_row(row, "here", columns)
        assert example.prompt == (prompt if isinstance(prompt, str) else tuple(prompt))
        if columns.reads_responses:
            assert (example.response, example.rejected) == (response, rejected)
        assert (example.ground_truth, example.data_source) == (ground_truth, data_source)
