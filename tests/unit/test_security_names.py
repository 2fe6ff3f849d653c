"""Names and archives of others: no file outside of a folder is touched, nothing grows without a bound."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from keystage.bundle.api import emulated
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.source import open_source
from keystage.bundle.store import PIPELINE_FILE, decode, is_file_name
from keystage.gateway.backend import GatewayError
from keystage.gateway.names import check_name, check_secret_name
from keystage.gateway.rest_page import Page, UnknownFile
from keystage.keysmanager.disk_cache import DiskCache
from keystage.loadgen.arrivals_files import ArrivalError, read_gaps
from keystage.loadgen.trace_lines import MAX_LINE_BYTES, TraceError
from keystage.loadgen.traces.opening import open_trace
from keystage.local.api import Deployment
from keystage.local.errors import BadDeployment
from keystage.local.program import check
from keystage.local.secret_store import SecretStore
from keystage.router.text import load_text

OUTSIDE = (
    "..", ".", "../x", "a/../../x", "/etc/passwd", "a/b", "x\0y", "./x", "x/",
    "../" * 40 + "etc/passwd", "a" * 256,
)  # fmt: skip
LINE_BREAKS = ("x\ny", "x\r\nX-Header: 1")


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_file_of_a_bundle_lies_outside_of_it(name: str) -> None:
    assert not is_file_name(name)
    pipeline = msgspec.to_builtins(emulated("em", 1, execution="looping"))
    for change in ({"tokenizer": name}, {"stages": [{**pipeline["stages"][0], "file": name}]}):
        with pytest.raises(BundleError, match="lies outside the bundle"):
            decode(msgspec.json.encode({**pipeline, **change}), Path(PIPELINE_FILE))


def test_names_of_files_are_taken() -> None:
    for name in ("a", "stage-0.safetensors", "..x", "x..", "ü.json", "a b", "tokenizer.json"):
        assert is_file_name(name)
        pipeline = msgspec.to_builtins(emulated("em", 1, execution="looping")) | {"tokenizer": name}
        assert decode(msgspec.json.encode(pipeline), Path(PIPELINE_FILE)).tokenizer == name


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_shard_of_a_model_lies_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    (tmp_path / "x").write_bytes(b"secret of another folder")
    with pytest.raises(SplitError, match="lies outside the folder"):
        open_source(folder).shapes()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "pytorch_model.pt"])
def test_pickled_parameters_are_refused_by_name_and_never_opened(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    mark = tmp_path / "was-run"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return mark.touch, ()

    torch.save({"x": Harm()}, tmp_path / file)
    with pytest.raises(SplitError, match="pickled parameters are never loaded"):
        open_source(tmp_path).shapes()
    assert not mark.exists()


def test_arrays_with_pickles_are_no_traces_and_not_opened(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return mark.touch, ()

    path = tmp_path / "trace.npz"
    np.savez(path, rows=np.array([Harm()], dtype=object))
    with pytest.raises(TraceError):
        list(open_trace(path).blocks())
    with pytest.raises(ArrivalError):
        read_gaps(path)
    assert not mark.exists()


def zeros(path: Path, nbytes: int, first: bytes = b"") -> Path:
    """A small gzip file of one endless line."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(first)
        for _ in range(nbytes >> 20):
            file.write(b"1" * (1 << 20))
    assert path.stat().st_size < nbytes / 500
    return path


def test_a_line_of_a_zipped_file_is_bounded_before_it_is_unpacked(tmp_path: Path) -> None:
    with pytest.raises(ArrivalError, match="more than 4096 characters"):
        read_gaps(zeros(tmp_path / "gaps.gz", 64 << 20, b"0.5\n"))
    with pytest.raises(TraceError, match=str(MAX_LINE_BYTES)):
        list(open_trace(zeros(tmp_path / "trace.csv.gz", 64 << 20), kind="azure-llm").blocks())


def test_a_tokenizer_is_read_from_its_bundle_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    (tmp_path / "b").mkdir()
    pipeline = msgspec.structs.replace(emulated("em", 1, execution="looping"), tokenizer="x")
    with pytest.raises(BundleError, match="No such file"):
        load_text(pipeline, tmp_path / "b")


@pytest.mark.parametrize("name", [*OUTSIDE, *LINE_BREAKS, "", "A", "%2e%2e", "x%00", "-x"])
def test_no_function_secret_or_pipeline_has_such_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(GatewayError):
        check_name(name)
    with pytest.raises(GatewayError):
        check_secret_name(name)
    store = SecretStore(tmp_path / "secrets", tmp_path / "replicas")
    for act in (lambda: store.put(name, b"x"), lambda: store.delete(name)):
        with pytest.raises(BadDeployment):
            act()
    assert not (tmp_path / "secrets").exists()
    with pytest.raises(BadDeployment):
        check(Deployment(service=name, image="none", envProcess="true"))
    if name not in ("A", "x%00", "%2e%2e"):
        env = {"KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": name, "KEYSTAGE_BUNDLE": "/b"}
        with pytest.raises(BadDeployment, match="KEYSTAGE_PIPELINE"):
            check(Deployment(service="r", image="none", envVars=env))


@pytest.mark.parametrize("name", [*OUTSIDE, "%2e%2e%2frest.py", "..\\rest.py", "app.js%00", "__init__.py"])
def test_the_page_serves_its_own_files_alone(name: str) -> None:
    with pytest.raises(UnknownFile):
        Page()._answer(None, name)  # type: ignore[arg-type]  # the request is not looked at


@pytest.mark.parametrize("name", [*OUTSIDE, "A" * 64, "0" * 63, "0" * 65])
def test_no_copy_of_parameters_is_found_or_dropped_by_another_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder, 1 << 20)
    folder.mkdir(exist_ok=True)
    (tmp_path / "x").write_text("kept")
    assert cache.find(name) is None
    cache.drop(name)
    assert (tmp_path / "x").read_text() == "kept"


def test_deflated_bytes_are_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(zlib.compress(bytes(1 << 24)))
    with pytest.raises(SplitError):
        open_source(tmp_path).shapes()
