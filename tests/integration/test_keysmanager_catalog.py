"""What a stage's name stands for: files replaced under it, homes over HTTP. Real files and servers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.keysmanager_bundles import folder_server, odd_server, write_stages

from keystage.bundle import store
from keystage.bundle.api import emulated
from keystage.bundle.errors import BundleError
from keystage.keysmanager.api import StageName
from keystage.keysmanager.catalog import HTTP_FRESH_S, Catalog


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = write_stages(tmp_path / "bundle", [5000, 6000])
    (folder / "tokenizer.json").write_text("{}")
    pipeline = store.load(folder)
    store.write(folder, msgspec.structs.replace(pipeline, tokenizer="tokenizer.json"))
    return folder


def test_a_folder(tmp_path: Path, bundle: Path) -> None:
    catalog = Catalog(tmp_path / "copies")
    parameters, body = catalog.resolve(StageName(bundle.as_uri(), 1))
    spec = store.load(bundle).stages[1]
    assert body == (bundle / "pipeline.json").read_bytes()
    assert (parameters.identity, parameters.nbytes) == (spec.identity, 6000)
    assert (parameters.file, parameters.chunks) == (spec.file, tuple(spec.chunks))
    assert catalog.local_folder(bundle.as_uri()) == bundle
    assert not (tmp_path / "copies").exists()


def test_replaced_where_it_lies(tmp_path: Path, bundle: Path) -> None:
    catalog, name = Catalog(tmp_path / "copies"), StageName(bundle.as_uri(), 0)
    before, _ = catalog.resolve(name)
    assert catalog.resolve(name)[0] == before
    write_stages(bundle, [5000, 6000], seed=2)
    after, body = catalog.resolve(name)
    assert after.identity != before.identity
    assert body == (bundle / "pipeline.json").read_bytes()


def test_same_length_in_place_is_noticed(tmp_path: Path, bundle: Path) -> None:
    catalog, name = Catalog(tmp_path / "copies"), StageName(bundle.as_uri(), 0)
    before, _ = catalog.resolve(name)
    file = bundle / "pipeline.json"
    file.write_bytes(file.read_bytes().replace(before.identity.encode(), b"0" * 64))
    assert catalog.resolve(name)[0].identity == "0" * 64


@pytest.mark.parametrize(
    ("stage", "change", "reason"),
    [
        (2, None, "stage 2: pipeline p has stages 0 to 1"),
        (-1, None, "stage -1"),
        (0, b"{", "not a pipeline description"),
        (0, b'{"version": 99}', "bundle version 99"),
    ],
)
def test_what_cannot_be_resolved(
    tmp_path: Path, bundle: Path, stage: int, change: bytes | None, reason: str
) -> None:
    if change is not None:
        (bundle / "pipeline.json").write_bytes(change)
    with pytest.raises(BundleError, match=reason):
        Catalog(tmp_path / "copies").resolve(StageName(bundle.as_uri(), stage))


def test_missing_then_there(tmp_path: Path) -> None:
    catalog, folder = Catalog(tmp_path / "copies"), tmp_path / "later"
    name = StageName(folder.as_uri(), 0)
    with pytest.raises(BundleError, match="No such file"):
        catalog.resolve(name)
    write_stages(folder, [100])
    assert catalog.resolve(name)[0].nbytes == 100


def test_addresses_that_are_none(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "copies")
    for address, reason in (
        ("ftp://h/b", "only file:///"),
        ("http://user:word@h/b", "with credentials"),
        ("http://[/b", "address"),
    ):
        with pytest.raises(BundleError, match=reason) as caught:
            catalog.resolve(StageName(address, 0))
        assert "user:word" not in str(caught.value)


def test_an_emulated_stage_has_no_parameters(tmp_path: Path) -> None:
    folder = tmp_path / "emulated"
    folder.mkdir()
    store.write(folder, emulated("e", 1, execution="looping"))
    catalog = Catalog(tmp_path / "copies")
    with pytest.raises(BundleError, match="is emulated"):
        catalog.resolve(StageName(folder.as_uri(), 0))
    assert catalog.pipeline(folder.as_uri())[0].name == "e"


def test_http_home_is_copied_and_asked_again(tmp_path: Path, bundle: Path) -> None:
    clock = Clock()
    catalog = Catalog(tmp_path / "copies", clock=clock)
    with folder_server(bundle) as home:
        name = StageName(home, 0)
        before, _ = catalog.resolve(name)
        copy = catalog.local_folder(home)
        assert (copy / "tokenizer.json").read_text() == "{}"
        assert store.load(copy) == store.load(bundle)
        write_stages(bundle, [5000, 6000], seed=3)
        assert catalog.resolve(name)[0] == before  # it was asked a moment ago
        clock.now_s += HTTP_FRESH_S
        after, _ = catalog.resolve(name)
        assert after.identity == store.load(bundle).stages[0].identity != before.identity
        assert store.load(copy).stages[0].identity == before.identity  # readers of it keep their version
        assert catalog.local_folder(home) != copy
        clock.now_s += HTTP_FRESH_S
        assert catalog.resolve(name)[0] == after


def test_http_home_that_is_gone_serves_its_last_version(tmp_path: Path, bundle: Path) -> None:
    clock = Clock()
    catalog = Catalog(tmp_path / "copies", clock=clock)
    with folder_server(bundle) as home:
        name = StageName(home, 1)
        known, _ = catalog.resolve(name)
    clock.now_s += HTTP_FRESH_S
    assert catalog.resolve(name)[0] == known
    # Also a daemon that starts anew.
    assert Catalog(tmp_path / "copies").resolve(name)[0] == known
    with pytest.raises(BundleError, match="no connection"):
        Catalog(tmp_path / "others").resolve(name)


def test_http_home_without_the_bundle(tmp_path: Path, bundle: Path) -> None:
    with folder_server(bundle) as home, pytest.raises(BundleError, match="not there"):
        Catalog(tmp_path / "copies").resolve(StageName(f"{home}/elsewhere", 0))
    (bundle / "tokenizer.json").unlink()
    with folder_server(bundle) as home, pytest.raises(BundleError, match=r"tokenizer.json' is not there"):
        Catalog(tmp_path / "copies").resolve(StageName(home, 0))


def test_http_home_that_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystage.keysmanager.loader_http.MAX_SMALL_BYTES", 1 << 20)

    def endless(handler):  # type: ignore[no-untyped-def]
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 16))

    with odd_server(endless) as home, pytest.raises(BundleError, match="larger than 1048576 bytes"):
        Catalog(tmp_path / "copies").resolve(StageName(home, 0))


def test_files_outside_an_http_bundle_are_not_asked_for(tmp_path: Path, bundle: Path) -> None:
    pipeline = store.load(bundle)
    store.write(bundle, msgspec.structs.replace(pipeline, tokenizer="../../secret"))
    with folder_server(bundle) as home, pytest.raises(BundleError, match="outside the bundle"):
        Catalog(tmp_path / "copies").resolve(StageName(home, 0))


def test_old_versions_are_swept(tmp_path: Path, bundle: Path) -> None:
    clock = Clock()
    catalog = Catalog(tmp_path / "copies", clock=clock)
    with folder_server(bundle) as home:
        for seed in range(6):
            write_stages(bundle, [50, 60], seed=seed)
            clock.now_s += HTTP_FRESH_S
            catalog.resolve(StageName(home, 0))
    (copies,) = (tmp_path / "copies").iterdir()
    assert sum(path.is_dir() for path in copies.iterdir()) == 3
