"""Console output: lines in columns, tables that fit, a progress bar on a terminal."""

import contextlib
import functools
import io
import itertools
import math
import os
import sys
import types

import pytest
import tqdm

from jax_ppo.reporting import console
from jax_ppo.run import reporter
from jax_ppo.run.supervised_tasks import REWARD_MODEL, SFT

VALUES = (0.5, 0.5, 0.0012, 0.8, 31.2, 0.013, 0.523, 1.25, 1.32, 12345.6)
METRICS = {column.metric: x for column, x in zip(reporter.COLUMNS, VALUES, strict=True)}
METRICS["perf/seconds_left"] = 41.4


@pytest.fixture
def lines(monkeypatch):
    """Return a function that makes the lines of a run of 30 steps on a terminal of a width."""

    def make_lines(width, has_bar=True, columns=reporter.COLUMNS, total=30):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(console, "shows_bars", lambda: has_bar)
        return console.StepLines(total, columns)

    return make_lines


class TestStepLines:
    def test_a_line_has_what_fits_and_a_log_the_time_left(self, lines):
        narrow = "step  7/30  reward  0.500  kl 0.0012  ent 0.800  len   31"
        assert lines(80).format(7, METRICS) == f"{narrow}  clip 0.013  1.32 s"
        assert lines(129).format(7, METRICS) == f"{narrow}  clip 0.013  1.32 s"
        wide = "clip 0.013  grads 0.523  1.250  1.32 s   12,346 tok/s"
        assert lines(130).format(7, METRICS) == f"{narrow}  {wide}"
        assert lines(80, has_bar=False).format(7, METRICS) == f"{narrow}  1.32 s  0:41 left"
        late = METRICS | {"perf/seconds_left": 3 * 3600 + 12 * 60}
        assert lines(130, has_bar=False).format(7, late) == f"{narrow}  {wide}  3h12 left"

    @pytest.mark.parametrize(
        "layout", [reporter.LAYOUT, reporter.CRITIC_LAYOUT, SFT.layout, REWARD_MODEL.layout]
    )
    @pytest.mark.parametrize("has_bar", [True, False])
    def test_no_line_of_any_command_wraps(self, layout, has_bar, lines):
        columns = layout.columns
        every = {column.metric: -0.5 for column in columns} | {"perf/seconds_left": 3599.0}
        for width, total in itertools.product((80, 120, 130, 140), (30, 4000)):
            line = lines(width, has_bar, columns, total).format(9, every)
            assert len(line) < width and "-0.5" in line and " s" in line

    def test_neither_the_sign_nor_the_size_of_a_number_moves_columns(self, lines):
        usual = lines(130).format(7, METRICS)
        odd = {"reward/mean": -9.5, "kl/reference": -0.0012, "actor/grad_norm": 1e9}
        odd |= {"reward/accuracy": -9.5, "seconds/step": 812.4, "response_length/mean": math.nan}
        line = lines(130).format(7, METRICS | odd)
        assert len(line) == len(usual)
        assert "reward -9.500  kl -0.001  ent" in line and "grads 1e+09" in line
        assert "len  nan" in line and "   812 s" in line.replace("  1.250", "  ")
        small = lines(130).format(7, METRICS | {"kl/reference": -4e-5, "reward/mean": -1e-9})
        assert "reward  0.000" in small and "kl 0.0000" in small
        missing = {name: METRICS[name] for name in ("perf/seconds_left", "reward/mean")}
        assert "kl      -  ent     -" in lines(130).format(7, missing)

    def test_accuracy_appears_once_it_is_not_the_reward_and_stays(self, lines):
        run = lines(80)
        accuracies = (math.nan, 0.5, 0.5 + 1e-8, 0.25, 0.5, math.nan)
        shown = ["acc" in run.format(1, METRICS | {"reward/accuracy": x}) for x in accuracies]
        assert shown == [False, False, False, True, True, True]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """Return a function that makes both outputs terminals, and returns them."""

    def open_terminal():
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, Terminal())
        return sys.stdout, sys.stderr

    return open_terminal


class TestProgress:
    @pytest.mark.parametrize("terminals", [(), ("stderr",), ("stdout",)])
    def test_lines_alone_unless_both_outputs_are_terminals(self, terminals, monkeypatch):
        """With `| tee` the error output is a terminal: a bar there would tear the lines."""
        for name in ("stdout", "stderr"):
            output = Terminal() if name in terminals else io.StringIO()
            monkeypatch.setattr(sys, name, output)
        with contextlib.closing(console.ProgressBar(3, 0)) as progress:
            with progress.phase("rollout"):
                console.print_on_main("between")
            progress.advance("step 1/3", 1.0)
        console.make_loading_reporter("actor")(3, 3)
        assert (sys.stdout.getvalue(), sys.stderr.getvalue()) == ("between\nstep 1/3\n", "")

    def test_a_bar_with_the_phase_on_a_terminal_until_the_end(self, open_terminal):
        terminal = open_terminal()
        with contextlib.closing(console.ProgressBar(10, 4)) as progress:
            with progress.phase("rollout"):
                pass
            progress.advance("step 5/10", 3700.2)
        bar = terminal[1].getvalue()
        assert "rollout:  40%" in bar and "4/10" in bar
        # The time left is the caller's: tqdm's own counts compilation in every step.
        assert ", about 1h01 left]" in bar
        assert bar.endswith("\r") and not bar.split("\r")[-2].strip(), "the bar is removed"
        assert terminal[0].getvalue().count("step 5/10\n") == 1

    def test_other_processes_show_nothing(self, monkeypatch, open_terminal):
        terminal = open_terminal()
        monkeypatch.setattr(console.distributed, "is_main", lambda: False)
        with contextlib.closing(console.ProgressBar(3, 0)) as progress:
            progress.advance("line", 1.0)
        assert [output.getvalue() for output in terminal] == ["", ""]

    def test_a_bar_counts_the_tensors_of_a_model(self, monkeypatch, open_terminal):
        terminal = open_terminal()
        at_once = functools.partialmethod(tqdm.tqdm.__init__, mininterval=0)
        monkeypatch.setattr(tqdm.tqdm, "__init__", at_once)
        report_progress = console.make_loading_reporter("actor")
        for loaded in range(1, 4):
            report_progress(loaded, 3)
        assert "loading the actor: 100%" in terminal[1].getvalue()

    @pytest.mark.parametrize(("seconds", "line"), [(1, ""), (7, "loaded the actor: 3 tensors\n")])
    def test_the_end_of_work_that_took_long_gets_a_line(self, monkeypatch, capsys, seconds, line):
        clock = types.SimpleNamespace(now=0.0)
        monkeypatch.setattr(console.time, "monotonic", lambda: clock.now)
        report_progress = console.make_loading_reporter("actor")
        clock.now = seconds
        report_progress(3, 3)
        assert capsys.readouterr().out == line

    def test_seconds_of_phases_add_up_until_taken(self, monkeypatch):
        clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 25.0])
        monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
        progress = console.ProgressBar(1, 0)
        for name in ("rollout", "rollout"):
            with progress.phase(name):
                pass
        with pytest.raises(ValueError), progress.phase("reward"):
            raise ValueError
        assert progress.take_seconds() == {"seconds/rollout": 3.0, "seconds/reward": 5.0}
        assert progress.take_seconds() == {}


class TestSampleTable:
    ROWS = [
        {"prompt": "1 + 1 =", "response": "two\nis 2\n", "score": 1.0, "correct": True},
        {
            "prompt": "p" * 500,
            "response": "begin" + "x" * 500 + "end",
            "score": -0.25,
            "correct": False,
        },
        {"prompt": "\x1b[2Jtab\there", "response": "答案是二" * 40, "score": 0.0, "correct": None},
    ]

    def test_each_response_stands_below_its_prompt(self):
        head, *rows = console.format_sample_table(self.ROWS, 80).splitlines()
        assert head.split()[:3] == ["score", "correct", "prompt"]
        assert rows[0] == "   1.000      yes  1 + 1 ="
        assert rows[1] == " " * 19 + "two⏎is 2"
        assert rows[2].startswith("  -0.250       no  ppp") and "…" in rows[2]
        assert rows[3].startswith(" " * 19 + "beginx") and rows[3].endswith("xend")
        assert len(rows[3].strip()) == 60
        assert rows[4] == "   0.000        -  ·[2Jtab·here"

    @pytest.mark.parametrize(
        ("prompts", "shown"),
        [
            (["Q: Ann ran. A:", "Q: Annette ran.\nA:"], ["…Ann ran. …", "…Annette ran.⏎…"]),
            (["a b c", "a b b c"], ["……", "…b …"]),
            (["a b", "a b"], ["a b", "a b"]),
            (["a b"], ["a b"]),
        ],
    )
    def test_words_that_all_prompts_share_are_left_out(self, prompts, shown):
        rows = [self.ROWS[0] | {"prompt": prompt} for prompt in prompts]
        lines = console.format_sample_table(rows, 80).splitlines()
        assert [line[19:] for line in lines[1::2]] == shown

    @pytest.mark.parametrize("width", [1, 40, 61, 100])
    def test_lines_are_narrower_than_the_terminal(self, width):
        def columns(line):
            return sum(2 if "一" <= c <= "鿿" else 1 for c in line)

        lines = console.format_sample_table(self.ROWS, width).splitlines()
        assert len(lines) == 7 and max(map(columns, lines)) == max(width, 40) - 1

    def test_the_terminal_s_width_also_behind_a_pipe_or_80(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "70")
        assert console.terminal_width() == 70
        monkeypatch.setenv("COLUMNS", "0")
        assert console.terminal_width() == 80

        def size(descriptor):
            if descriptor != 0:
                raise OSError
            return os.terminal_size((91, 24))

        monkeypatch.setattr(os, "get_terminal_size", size)
        assert console.terminal_width() == 91
