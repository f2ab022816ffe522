"""`preft.json`: a round trip, and everything that is not exactly a manifest refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preft.adapters.jsonfile import parse_json_object
from preft.adapters.manifest import FORMAT_VERSION, Manifest
from preft.adapters.remarks import head_note
from preft.errors import AdapterError, PreftError
from tests.helpers.tiny import random_adapter


@pytest.fixture(scope="module")
def manifest(tiny_llama: Path) -> Manifest:
    return random_adapter(tiny_llama, seed=1, targets=("q_proj",), blocks=(1,), positions="f2+l1").manifest


@pytest.fixture
def document(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_json())


def test_round_trip_through_text(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert Manifest.from_dict(parse_json_object(text.encode(), "x")) == manifest
    assert text.endswith("}\n")
    assert sum('"path"' in line for line in text.splitlines()) == len(manifest.sites)


def test_labels(manifest: Manifest, tiny_llama: Path) -> None:
    assert (manifest.kind, manifest.label) == ("mixed", "LoRA+DiReFT(P)")
    expected = {("q_proj", (), "prompt"): "LoRAP", ("q_proj", (), "all"): "LoRA", ("", (0,), "l1"): "DiReFTP"}
    for (target, blocks, positions), label in expected.items():
        targets = (target,) if target else ()
        adapter = random_adapter(tiny_llama, seed=1, targets=targets, blocks=blocks, positions=positions)
        assert adapter.manifest.label == label


@pytest.mark.parametrize("where", ["", "base", "sites"])
def test_an_unknown_key_is_refused(where: str, document: dict[str, Any]) -> None:
    target = document if not where else document[where] if where == "base" else document[where][0]
    target["surprise"] = 1
    with pytest.raises(AdapterError, match="surprise"):
        Manifest.from_dict(document)


@pytest.mark.parametrize("key", ["positions", "sites", "base", "digest", "dtype", "kind", "format"])
def test_a_missing_key_is_refused(key: str, document: dict[str, Any]) -> None:
    del document[key]
    with pytest.raises(AdapterError):
        Manifest.from_dict(document)


def test_a_newer_version_says_upgrade(document: dict[str, Any]) -> None:
    document["format"] = FORMAT_VERSION + 1
    document["of the future"] = True
    with pytest.raises(AdapterError) as caught:
        Manifest.from_dict(document)
    assert "upgrade" in (caught.value.hint or "")


@pytest.mark.parametrize("version", [0, "1", True, None, 1.5])
def test_other_versions_are_refused(version: Any, document: dict[str, Any]) -> None:
    document["format"] = version
    with pytest.raises(AdapterError, match="format version"):
        Manifest.from_dict(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("positions",), "f0"),
        (("dtype",), "int8"),
        (("kind",), "lora"),
        (("sites",), []),
        (("sites",), None),
        (("sites", 0, "rank"), 0),
        (("sites", 0, "rank"), True),
        (("sites", 0, "scale"), "2"),
        (("sites", 0, "path"), ""),
        (("sites", 0, "kind"), "convolution"),
        (("sites", 0, "bias"), 1),
        (("base",), 3),
        (("base", "architecture"), 3),
    ],
)
def test_values_of_the_wrong_kind_are_refused(path: tuple[Any, ...], value: Any, document: dict[str, Any]) -> None:
    target: Any = document
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(PreftError):
        Manifest.from_dict(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sites", 0, "scale"), 10**400),
        (("sites", 0, "scale"), float("inf")),
        (("digest",), None),
        (("digest",), 5),
        (("chat_template_sha256",), 5),
        (("base", "model"), ["x"]),
        (("base", "mismatch_allowed"), 1),
    ],
)
def test_values_that_would_pass_for_others_are_refused(
    path: tuple[Any, ...], value: Any, document: dict[str, Any]
) -> None:
    """A digest of null was none to compare with, and a scale beyond a float's range ended the server's start."""
    target = document
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(AdapterError):
        Manifest.from_dict(document)


def test_sites_in_disorder_or_twice_are_refused(document: dict[str, Any]) -> None:
    document["sites"].reverse()
    with pytest.raises(AdapterError, match="order"):
        Manifest.from_dict(document)
    document["sites"].reverse()
    document["sites"].insert(0, document["sites"][0])
    with pytest.raises(AdapterError, match="twice"):
        Manifest.from_dict(document)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": 1,\n "b": {"c": 1, "c": 2}}', "line 2, column 16"),
        ('{"x": {"a": 1}, "y": ["a", {"a": 2}], "a": 3,\n"\\u0061": 4}', "line 2, column 1"),
        (r'{"a": "\"b\": 1", "b": "{", "b": 2}', "line 1, column 29"),
        ('{\n"a": "a: {",\n"b": 1,\n  "a": 2}', "line 4, column 3"),
        ('{"a": 1 "b": 2}', "line 1, column 9"),
        ('{"a": 1', "line 1, column 8"),
    ],
)
def test_json_errors_have_line_and_column(text: str, where: str) -> None:
    with pytest.raises(AdapterError) as caught:
        parse_json_object(text.encode(), "preft.json")
    assert where in str(caught.value)


@pytest.mark.parametrize(
    "text", ["NaN", '{"a": Infinity}', '{"a": 1e999}', '{"a": -1e999}', "3", '"x"', "null", "", "[" * 100_000]
)
def test_what_is_not_an_object_is_refused(text: str) -> None:
    with pytest.raises(AdapterError, match=r"preft\.json"):
        parse_json_object(text.encode(), "preft.json")


@pytest.mark.parametrize("text", [r'{"a": ["\ud800"]}', r'{"\uDFFF": 1}', r'{"a": "\udc00\ud83d"}'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(AdapterError, match="other half"):
        parse_json_object(text.encode(), "preft.json")


def test_a_whole_character_in_two_escapes_is_read() -> None:
    assert parse_json_object(rb'{"a": "\ud83d\ude00", "b": "\\ud800"}', "x") == {"a": "\U0001f600", "b": "\\ud800"}


def test_a_byte_order_mark_is_read_over() -> None:
    assert parse_json_object(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}


def test_the_head_is_remarked_upon_only_where_it_matters(tiny_llama: Path) -> None:
    prompt = random_adapter(tiny_llama, seed=1, targets=("lm_head",)).manifest
    everywhere = random_adapter(tiny_llama, seed=1, targets=("lm_head",), positions="all").manifest
    assert "token 1" in (head_note(prompt) or "")
    assert head_note(everywhere) is None
    assert head_note(random_adapter(tiny_llama, seed=1, targets=("q_proj",)).manifest) is None
