"""YAML reading: what is accepted, what is refused, and that every refusal names its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.document import MAX_BYTES, parse_document, read_document


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("1", 1),
        ("-7", -7),
        ("0.90", 0.9),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("512/256", "512/256"),
        ("8:30", "8:30"),
        ("007", "007"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("'on'", "on"),
        ('"1"', "1"),
        ("'.nan'", ".nan"),
        ("y", "y"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(typed: str, value: object) -> None:
    found = parse_document(f"key: {typed}", "f.yaml").data["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml:1: the file is empty"),
        ("# only a comment\n", "f.yaml:1: the file is empty"),
        ("- a\n- b", "f.yaml:1: the top level must be a mapping (`key: value`), not a list"),
        ("words", "not the value 'words'"),
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: duplicate key 'a', first used on line 1"),
        ("a:\n  b: {c: 1, c: 2}", "f.yaml:2: a.b.c: duplicate key 'c', first used on line 2"),
        ("a: 1\nb: on", "f.yaml:2: b: 'on' is ambiguous"),
        ("a: [1, No]", "f.yaml:1: a.1: 'No' is ambiguous"),
        ("a: .NaN", "not a finite number"),
        ("a: -.inf", "not a finite number"),
        ("a: 1e999", "too large"),
        ("a: " + "9" * 30, "too large"),
        ("a: 1\nb: [1, 2", "f.yaml:2: not valid YAML"),
        ("a:\n\t- b", "f.yaml:2: not valid YAML"),
        ("a: b: c", "f.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML: but found another document"),
        ("a: 1\nb: !!python/object/apply:os.system [x]", "f.yaml:2: not valid YAML: tags such as"),
        ("a: !!str 5", "not allowed"),
        ("a: *b", "undefined alias"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "f.yaml:3: c: merge keys"),
        ("? [a, b]\n: c", "a key must be one word, not a list"),
        ("a: &a\n  b: *a", "nested too deeply"),
        ("a: " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: \x07", "character #x0007 is not allowed"),
    ],
)
def test_refusals_name_the_place(text: str, message: str) -> None:
    with pytest.raises(UsageProblem) as caught:
        parse_document(text, "f.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.yaml")


def test_aliases_are_written_out_but_not_without_bound() -> None:
    assert parse_document("a: &x [1, 2]\nb: *x", "f").data == {"a": [1, 2], "b": [1, 2]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(UsageProblem, match=r"more than 20000 values once aliases are written out"):
        parse_document(bomb, "f")


def test_environment_values_stay_as_typed() -> None:
    data = parse_document("env: {A: 1.10, B: true, C: off, D: 007, E: .inf, F: 1e999}", "f").data
    assert data["env"] == {"A": "1.10", "B": "true", "C": "off", "D": "007", "E": ".inf", "F": "1e999"}


def test_lines_of_nested_values() -> None:
    document = parse_document("a:\n  - 1\n  - b:\n      c: 2\n", "f.yaml")
    assert document.line(("a",)) == 1
    assert document.line(("a", 0)) == 2
    assert document.line(("a", 1, "b", "c")) == 4
    assert document.line(("a", 1, "b", "nowhere")) == 3, "a missing key is placed at its parent"
    assert str(document.problem(("a", 1, "b"), "bad")) == "f.yaml:3: a.1.b: bad"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"none.yaml: cannot be read: No such file"):
        read_document(tmp_path / "none.yaml")
    with pytest.raises(UsageProblem, match="cannot be read: Is a directory"):
        read_document(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(UsageProblem, match=r"latin.yaml:2: not UTF-8 text \(byte 0xe9\)"):
        read_document(latin)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageProblem, match="larger than"):
        read_document(big)
    marked = tmp_path / "bom.yaml"
    marked.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_document(marked).data == {"a": 1, "b": 2}


@given(st.text(max_size=200))
def test_any_text_gives_data_or_a_usage_problem(text: str) -> None:
    try:
        data = parse_document(text, "f.yaml").data
    except UsageProblem as problem:
        assert str(problem).startswith("f.yaml")
    else:
        assert isinstance(data, dict)


@given(st.text(alphabet="0123456789.+-eE_xinfa~", max_size=30))
def test_a_plain_number_is_always_finite(text: str) -> None:
    try:
        value = parse_document(f"a: {text}", "f").data["a"]
    except UsageProblem:
        return
    if isinstance(value, float):
        assert math.isfinite(value)
