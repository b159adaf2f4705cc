"""Rows with the columns of public data sets are read as what they are, or refused with a way."""

import json

import pytest

from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import GSM8K, HH_RLHF, MATH, parse_row
from jax_ppo.errors import UserError

Q = "How many legs has a cat?"
ASK = [{"role": "user", "content": Q}]
CHAT = [*ASK, {"role": "assistant", "content": "Four."}]
WORSE = [*ASK, {"role": "assistant", "content": "Five."}]
SHARE = [{"from": "human", "value": Q}, {"from": "gpt", "value": "Four."}]
TRANSCRIPT = f"\n\nHuman: {Q}\n\nAssistant:"
BE = {"role": "system", "content": "Be brief."}
SCORES = {"helpfulness": 4, "correctness": 4, "coherence": 4, "complexity": 1, "verbosity": 1}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "count"}]}
VERL = {"prompt": ASK, "reward_model": {"ground_truth": "4", "style": "rule"}}

PREFERENCES = {
    "HuggingFaceH4/ultrafeedback_binarized": {
        "prompt": Q,
        "prompt_id": "i",
        "chosen": CHAT,
        "rejected": WORSE,
        "messages": CHAT,
        "score_chosen": 8.0,
    },
    "trl-lib/ultrafeedback_binarized": {"chosen": CHAT, "rejected": WORSE, "score_chosen": 8.0},
    "argilla/distilabel-intel-orca-dpo-pairs": {
        "system": "",
        "input": Q,
        "chosen": "Four.",
        "rejected": "Five.",
        "rating": [1, 2],
        "status": "ok",
    },
}
PROMPTS = {
    "trl-lib/ultrafeedback-prompt": {"prompt": ASK},
    "openbmb/UltraFeedback": {
        "source": "s",
        "instruction": Q,
        "models": ["m"],
        "completions": [{"a": 1}],
        "correct_answers": ["None"],
    },
    "Salesforce/xlam-function-calling-60k": {
        "id": 0,
        "query": Q,
        "answers": "[]",
        "tools": '[{"name": "count"}]',
    },
    "argilla/ultrafeedback-binarized-preferences": {
        "source": "s",
        "instruction": Q,
        "chosen_response": "x",
        "rejected_response": "y",
    },
}
REFUSED = {
    "stanfordnlp/SHP": {
        "post_id": "x",
        "history": Q,
        "human_ref_A": "Four.",
        "human_ref_B": "F",
        "labels": 1,
    },
    "HuggingFaceH4/ultrachat_200k": {
        "prompt": Q,
        "prompt_id": "p",
        "messages": [
            *CHAT,
            {"role": "user", "content": "And a dog?"},
            {"role": "assistant", "content": "Four."},
        ],
    },
    "Jiayi-Pan/Countdown-Tasks-3to4": {"target": 98, "nums": [44, 19, 35]},
    "google-research-datasets/mbpp": {"task_id": 1, "text": "Write f.", "code": "c"},
    "allenai/ai2_arc": {
        "id": "i",
        "question": Q,
        "choices": {"text": ["4"], "label": ["A"]},
        "answerKey": "A",
    },
    "deepmind/aqua_rat": {"question": Q, "options": ["A)4"], "rationale": "r", "correct": "A"},
    "glaiveai/glaive-function-calling-v2": {"system": "SYSTEM: x", "chat": "USER: y"},
}
ANSWERS = {
    "allenai/tulu-3-sft-mixture": {"id": "i", "messages": CHAT, "source": "s"},
    "databricks/databricks-dolly-15k": {
        "instruction": Q,
        "context": "",
        "response": "Four.",
        "category": "qa",
    },
    "ShareGPT": {"id": "i", "conversations": SHARE},
    "teknium/OpenHermes-2.5": {
        "conversations": SHARE,
        "system_prompt": None,
        "source": "s",
        "skip_prompt_formatting": None,
        "idx": None,
    },
    "trl-lib/kto-mix-14k": {"prompt": ASK, "completion": CHAT[1:], "label": True},
    "lmsys/chat with other roles": {
        "conversation": [{"role": "human", "content": Q}, {"role": "gpt", "content": "Four."}]
    },
}
# Row, and its prompt, response, rejected response, reference answer and data_source; "?" and a part
# of the message for what is refused.
LAYOUTS = {
    **{name: (row, (ASK, "Four.", "Five.", "", "")) for name, row in PREFERENCES.items()},
    **{name: (row, (ASK, None, None, "", "")) for name, row in PROMPTS.items()},
    **{name: (row, ("?data.prompt_key", None, None, "", "")) for name, row in REFUSED.items()},
    **{name: (row, (ASK, "Four.", None, "", "")) for name, row in ANSWERS.items()},
    "openai/gsm8k": (
        {"question": Q, "answer": "Legs.\n#### 4"},
        (ASK, "Legs.\n#### 4", None, "4", GSM8K),
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        {**VERL, "data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "1"}},
        (ASK, None, None, "4", "math_dapo"),
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        {
            "prompt": Q,
            "solution": "4",
            "data_source": "math_dapo",
            "source_prompt": ASK,
            "ability": "MATH",
            "reward_model": {"ground_truth": "4", "style": "r"},
            "extra_info": {"index": "1"},
        },
        (Q, "4", None, "4", "math_dapo"),
    ),
    "AI-MO/NuminaMath-CoT": (
        {
            "source": "x",
            "problem": Q,
            "solution": r"\boxed{4}",
            "messages": [*ASK, {"role": "assistant", "content": r"\boxed{4}"}],
        },
        (ASK, r"\boxed{4}", None, r"\boxed{4}", MATH),
    ),
    "open-r1/OpenR1-Math-220k": (
        {
            "problem": Q,
            "solution": "S",
            "answer": "4",
            "problem_type": "x",
            "uuid": "u",
            "generations": ["g"],
            "messages": CHAT,
        },
        (ASK, "?supervised.response_key", None, "4", MATH),
    ),
    "Anthropic/hh-rlhf": (
        {"chosen": TRANSCRIPT + " Four.", "rejected": TRANSCRIPT + " Five."},
        (TRANSCRIPT, " Four.", " Five.", "", HH_RLHF),
    ),
    "Dahoas/full-hh-rlhf": (
        {"prompt": TRANSCRIPT, "response": " Four.", "chosen": " Four.", "rejected": " Five."},
        (TRANSCRIPT, " Four.", " Five.", "", ""),
    ),
    "allenai/RLVR-GSM-MATH-IF-Mixed-Constraints": (
        {"messages": ASK, "ground_truth": "4", "dataset": "gsm8k", "constraint": None},
        (ASK, None, None, "4", ""),
    ),
    "zwhe99/DeepMath-103K": (
        {"question": Q, "final_answer": "4", "topic": "t", "r1_solution_1": "s"},
        (ASK, None, None, "4", ""),
    ),
    "tatsu-lab/alpaca": (
        {"instruction": "Count.", "input": Q, "output": "Four.", "text": "t"},
        ([{"role": "user", "content": f"Count.\n\n{Q}"}], "Four.", None, "", ""),
    ),
    "Open-Orca/OpenOrca": (
        {"id": "i", "system_prompt": "Be brief.", "question": Q, "response": "Four."},
        ([BE, *ASK], "Four.", None, "", ""),
    ),
    "open-thoughts/OpenThoughts-114k": (
        {"system": "Be brief.", "conversations": SHARE},
        ([BE, *ASK], "Four.", None, "", ""),
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "Be brief.", "question": Q, "chosen": "Four.", "rejected": "Five."},
        ([BE, *ASK], "Four.", "Five.", "", ""),
    ),
    "HuggingFaceH4/MATH-500": (
        {
            "problem": Q,
            "solution": "S",
            "answer": "4",
            "subject": "s",
            "level": 2,
            "unique_id": "u",
        },
        (ASK, "S", None, "4", MATH),
    ),
    "Maxwell-Jia/AIME_2024": (
        {"ID": "2024-I-1", "Problem": Q, "Solution": "S", "Answer": 4},
        (ASK, "S", None, "4", MATH),
    ),
    "SynthLabsAI/Big-Math-RL-Verified": (
        {"problem": Q, "answer": "4", "source": "s", "domain": ["d"], "llama8b_solve_rate": 0.5},
        (ASK, "4", None, "4", MATH),
    ),
    "nvidia/OpenMathReasoning": (
        {"problem": Q, "expected_answer": "4", "generated_solution": "g", "problem_type": "p"},
        (ASK, None, None, "4", MATH),
    ),
    "nvidia/HelpSteer2": ({"prompt": Q, "response": "Four.", **SCORES}, (Q, "Four.", None, "", "")),
    "trl-lib/tldr": (
        {"prompt": "POST: x TL;DR:", "completion": " short"},
        ("POST: x TL;DR:", " short", None, "", ""),
    ),
    "TIGER-Lab/WebInstruct-verified": (
        {"id": 1, "question": Q, "answer": "4", "answer_type": "Integer", "difficulty": "x"},
        (ASK, "4", None, "4", ""),
    ),
    "rajpurkar/squad": (
        {
            "id": "i",
            "title": "t",
            "context": "Cats have four.",
            "question": Q,
            "answers": {"text": ["four"]},
        },
        ([{"role": "user", "content": f"{Q}\n\nCats have four."}], None, None, "", ""),
    ),
    "simplescaling/s1K": (
        {
            "solution": "4",
            "question": Q,
            "cot_type": "math",
            "source_type": "s",
            "cot": None,
            "thinking_trajectories": ["t"],
        },
        (ASK, "4", None, "", ""),
    ),
    "PKU-Alignment/PKU-SafeRLHF": (
        {"prompt": Q, "response_0": "Four.", "response_1": "Five.", "better_response_id": 0},
        (Q, None, None, "", ""),
    ),
    "PeterJinGo/nq_hotpotqa_train": (
        {
            "id": "i",
            "question": Q,
            "golden_answers": ["4"],
            "prompt": ASK,
            "data_source": "searchR1_nq",
            "ability": "x",
            "reward_model": {"ground_truth": {"target": ["4"]}},
            "extra_info": {"index": 0},
        },
        (ASK, None, None, {"target": ["4"]}, "searchR1_nq"),
    ),
    "GAIR/lima": (
        {"conversations": [Q, "Four."], "source": "s"},
        ("?must have role and content", None, None, "", ""),
    ),
    "m-a-p/CodeFeedback": (
        {"query": Q, "answer": "Four.", "resource": "r", "lang": "en"},
        (ASK, "Four.", None, "Four.", ""),
    ),
    "PRIME-RL/Eurus-2-RL-Data": (
        {**VERL, "prompt": [BE, *ASK], "data_source": "numina_olympiads", "ability": "math"},
        ([BE, *ASK], None, None, "4", "numina_olympiads"),
    ),
    "Toucan": (
        {"messages": json.dumps([*ASK, CALL]), "tools": '[{"name": "count"}]'},
        (ASK, "?tool_calls of the last message of messages is not learned", None, "", ""),
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
