"""Fault strings: what they mean, and what is said about the ones that mean nothing."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest

from pytest_pdperf.engines.sim import faults as module
from pytest_pdperf.engines.sim.faults import ROLES_OF_FAULT, Chance, Dice, Faults, Throttle
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Role


def test_an_empty_text_is_a_healthy_engine() -> None:
    assert Faults.parse("") == Faults.parse(" , ") == Faults()
    assert Faults().active == ()


def test_every_kind_of_value() -> None:
    faults = Faults.parse(
        "decode_step=1.15, link=0.5,transfer_fail=every:3,recompute=0.25,die_after_tokens=7"
    )
    assert faults.decode_step == 1.15
    assert faults.link == 0.5
    assert faults.transfer_fail == Chance(every=3)
    assert faults.recompute == Chance(probability=0.25)
    assert faults.die_after_tokens == 7
    assert faults.active == ("decode_step", "link", "transfer_fail", "recompute", "die_after_tokens")
    assert Faults.parse("throttle=1.4").throttle == Throttle(1.4, 0.0)
    assert Faults.parse("throttle=1.4:20").throttle == Throttle(1.4, 20.0)
    assert Faults.parse("slow_start=0.5").slow_start == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode_stp=2", "did you mean 'decode_step'"),
        ("nonsense=2", "there are: "),
        ("decode_step", "needs a value, as in decode_step=1.15"),
        ("decode_step=", "needs a value"),
        ("decode_step=0", "above 0"),
        ("decode_step=inf", "finite"),
        ("decode_step=nan", "finite"),
        ("decode_step=fast", "decode_step=fast"),
        ("leak=1.5", "from 0 to 1"),
        ("leak=every:0", "above 0"),
        ("leak=every:x", "leak=every:x"),
        ("die_after_tokens=-1", "above 0"),
        ("slow_start=-1", "0 or more"),
        ("link=0.5,link=0.6", "given twice"),
    ],
)
def test_a_bad_text_is_a_usage_problem_with_place_value_and_way_out(text: str, said: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        Faults.parse(text, "decode.args.faults")
    assert str(caught.value).startswith("decode.args.faults: ")
    assert said in str(caught.value)


def test_every_fault_has_a_parser_a_working_example_and_roles() -> None:
    names = {f.name for f in fields(Faults)}
    assert names == set(module._PARSERS) == set(module._EXAMPLES) == set(ROLES_OF_FAULT)
    for name in names:
        assert Faults.parse(f"{name}={module._EXAMPLES[name]}").active == (name,)


def test_faults_say_where_they_have_no_effect() -> None:
    faults = Faults.parse("link=0.5,leak=1")
    assert faults.without_effect_on(Role.DECODE) == ("link",)
    assert faults.without_effect_on(Role.PREFILL) == ()


def test_every_nth_strikes_exactly_and_a_probability_by_seed() -> None:
    dice = Dice(Chance(every=3), Random(0))
    assert [dice.strikes() for _ in range(7)] == [False, False, True, False, False, True, False]
    one, same, other = (Dice(Chance(probability=0.5), Random(seed)) for seed in (1, 1, 2))
    rolls = [[d.strikes() for _ in range(200)] for d in (one, same, other)]
    assert rolls[0] == rolls[1] != rolls[2]
    assert 60 < sum(rolls[0]) < 140
    assert not any(Dice(Chance(), Random(0)).strikes() for _ in range(10))
    assert all(Dice(Chance(probability=1.0), Random(i)).strikes() for i in range(10))
