"""Console output: lines in columns, tables that fit, a progress bar on a terminal."""

import functools
import io
import math
import sys
import types

import pytest
import tqdm

from jax_ppo.reporting import console
from jax_ppo.run import reporter


class TestConsole:
    def test_lines_stand_in_columns(self):
        metrics = {
            "reward/mean": 0.5,
            "reward/accuracy": 0.25,
            "kl/reference": 0.0012,
            "actor/entropy": 0.8,
            "response_length/mean": 31.2,
            "actor/clip_fraction": 0.013,
            "actor/grad_norm": 0.523,
            "critic/grad_norm": 1.25,
            "seconds/step": 1.32,
            "tokens_per_second": 12345.6,
        }
        line = console.format_step_line(7, 200, metrics, reporter.COLUMNS)
        assert line == (
            "step   7/200  reward  0.500  acc 0.250  kl 0.0012  ent 0.800  len   31  clip 0.013  "
            "grads 0.523   1.25   1.32 s   12,346 tok/s"
        )
        odd = {
            "reward/mean": -9.5,
            "reward/accuracy": 1.0,
            "actor/grad_norm": math.nan,
            "critic/grad_norm": 1e9,
        }
        assert len(console.format_step_line(123, 200, odd, reporter.COLUMNS)) == len(line)

    def test_accuracy_is_left_out_where_there_is_none(self):
        assert "acc" not in console.format_step_line(1, 2, {"reward/mean": 1.0}, reporter.COLUMNS)
        assert "acc" not in console.format_step_line(
            1, 2, {"reward/accuracy": math.nan}, reporter.COLUMNS
        )


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgress:
    def test_plain_lines_where_there_is_no_terminal(self, capsys):
        with console.ProgressBar(3, 0, enabled=True) as progress:
            with progress.phase("rollout"):
                progress.print_line("between")
            progress.advance("step 1/3", 1.0)
        assert capsys.readouterr() == ("between\nstep 1/3\n", "")

    def test_a_bar_with_the_phase_on_a_terminal(self, monkeypatch, capsys):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with console.ProgressBar(10, 4, enabled=True) as progress:
            with progress.phase("rollout"):
                pass
            progress.advance("step 5/10", 3700.2)
        assert "rollout" in terminal.getvalue() and "5/10" in terminal.getvalue()
        # The time left is the caller's: tqdm's own counts compilation in every step.
        assert ", about 1:01:40 left]" in terminal.getvalue()
        assert "step 5/10\n" in capsys.readouterr().out

    def test_other_processes_show_nothing(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stderr", Terminal())
        with console.ProgressBar(3, 0, enabled=False) as progress:
            progress.advance("line", 1.0)
        assert capsys.readouterr().out == "" and sys.stderr.getvalue() == ""

    def test_a_bar_counts_the_tensors_of_a_model(self, monkeypatch, capsys):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        at_once = functools.partialmethod(tqdm.tqdm.__init__, mininterval=0)
        monkeypatch.setattr(tqdm.tqdm, "__init__", at_once)
        report_progress = console.make_loading_reporter("actor")
        for loaded in range(1, 4):
            report_progress(loaded, 3)
        assert "loading the actor: 100%" in terminal.getvalue()

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
        progress = console.ProgressBar(1, 0, enabled=False)
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

    @pytest.mark.parametrize("width", [1, 5, 21, 24])
    def test_a_terminal_of_any_width_shows_it(self, width):
        table = console.format_sample_table([self.ROWS[0]], width)
        assert "prompt" in table and "response" in table

    def test_it_reads_as_a_table(self):
        head, short, long, odd = console.format_sample_table(self.ROWS, 80).splitlines()
        assert head.split() == ["prompt", "response", "score", "correct"]
        assert (
            short.split("  ")[0] == "1 + 1 ="
            and "two⏎is 2 " in short
            and short.split()[-2:] == ["1.000", "yes"]
        )
        assert (
            "…" in long
            and "begin" in long
            and "end " in long
            and long.split()[-2:] == ["-0.250", "no"]
        )
        assert "·[2Jtab·here" in odd and "\x1b" not in odd and odd.split()[-2:] == ["0.000", "-"]

    @pytest.mark.parametrize("width", [40, 61, 100])
    def test_no_line_is_wider_than_asked(self, width):
        def columns(line):
            return sum(2 if "一" <= c <= "鿿" else 1 for c in line)

        lines = console.format_sample_table(self.ROWS, width).splitlines()
        assert len(lines) == 4 and {columns(line) for line in lines} == {width}

    def test_the_terminal_s_width_or_100(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "70")
        assert len(console.format_sample_table([])) == 70
        monkeypatch.setenv("COLUMNS", "0")
        assert len(console.format_sample_table([])) == 100
