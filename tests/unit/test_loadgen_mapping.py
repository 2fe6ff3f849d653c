"""Functions of a trace to pipelines: pairs, files, hashing, and refusals by name."""

from pathlib import Path

import pytest

from keystage.loadgen.mapping import MappingError, mapping, unseen


def test_pairs_files_and_hashing(tmp_path: Path) -> None:
    file = tmp_path / "map.csv"
    file.write_text(
        "\ufeff# function,pipeline\n\napp/one, chat\napp/two,embed\na,b/c,embed\n", encoding="utf-8"
    )
    made = mapping([str(file), "app/three=chat", "x=y/four=vision", "hash:spare,chat"])
    assert made.pipelines == ("chat", "embed", "vision", "spare")
    wanted = {"app/one": 0, "app/two": 1, "a,b/c": 1, "app/three": 0, "x=y/four": 2}
    assert {name: made.target(name) for name in wanted} == wanted
    assert {made.pipelines[made.target(f"other/{n}")] for n in range(50)} == {"spare", "chat"}
    assert made.addresses("http://g:8080/")[:2] == (
        "http://g:8080/function/chat",
        "http://g:8080/function/embed",
    )


def test_hashing_spreads_functions_evenly_and_always_alike() -> None:
    made = mapping(["hash:a,b,c"])
    counts = [0, 0, 0]
    for number in range(3000):
        counts[made.target(f"app/function-{number}")] += 1
    # Binomial(3000, 1/3): standard deviation 25.8; five of them.
    assert all(abs(count - 1000) <= 130 for count in counts)
    assert [made.target(name) for name in ("app/f", "app/g", "h")] == [0, 1, 2], "the same in every version"


def test_without_a_list_to_hash_over_all_named_pipelines_are_used() -> None:
    made = mapping(["f=a", "g=b"])
    assert {made.target(f"other-{n}") for n in range(50)} == {0, 1}


def test_strict_refuses_what_is_not_named() -> None:
    made = mapping(["f=a", "strict"])
    assert made.target("f") == 0
    with pytest.raises(
        MappingError, match=r"--map strict: function 'g' of the trace is not among the 1 mapped"
    ):
        made.target("g")


def test_functions_that_never_come_are_told() -> None:
    made = mapping([f"f{n}=a" for n in range(8)])
    assert unseen(made, {f"f{n}" for n in range(8)}) == ""
    assert unseen(made, {"f0"}) == "--map names functions without an arrival: f1, f2, f3, f4, f5 and 2 more"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["f=a", "f=b"], "--map f=b: function 'f' is mapped to 'a' already"),
        (["=a"], "--map =a: a function's name is needed"),
        (["f="], "a pipeline is named by letters, digits, '-', '_', '.', got ''"),
        (["f=a b"], "got 'a b'"),
        (["f=../x"], "got '../x'"),
        (["hash:a,,b"], "--map hash:a,,b: a pipeline is named by"),
        (["strict", "hash:a"], "--map strict and --map hash: contradict each other"),
        (["strict"], "--map names no pipeline, got strict"),
        (
            ["nowhere.csv"],
            "neither function=pipeline, hash:..., strict nor a file that can be read: No such file",
        ),
    ],
)
def test_refusals(values: list[str], told: str) -> None:
    with pytest.raises(MappingError) as caught:
        mapping(values)
    assert told in str(caught.value)


def test_lines_that_say_nothing_are_named(tmp_path: Path) -> None:
    file = tmp_path / "map.csv"
    file.write_text("f,a\nnonsense\n")
    with pytest.raises(MappingError, match=r"map.csv, line 2: expected function,pipeline, found 'nonsense'"):
        mapping([str(file)])
    file.write_text("f,a\nf,b\n")
    with pytest.raises(MappingError, match=r"map.csv, line 2: function 'f' is mapped to 'a' already"):
        mapping([str(file)])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(MappingError, match="is not text"):
        mapping([str(file)])
