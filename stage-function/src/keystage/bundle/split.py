"""`keystage split`: from a model to a bundle and a `stack.yml`.

Order: find the model, plan the stages and check the plan against the parameters that are there
(`bundle.plan`), write the stages one parameter at a time (`bundle.stage_file`), hash them, and
rename the finished folder into place. Nothing half-written is ever visible under the bundle's name.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from keystage.bundle import partition, store
from keystage.bundle.api import BUNDLE_VERSION, Execution, Pipeline, StageSpec, emulated
from keystage.bundle.dtypes import ITEM_BYTES, full_name
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.folder import check_place, check_room, new_folder
from keystage.bundle.hashing import file_chunks, identity
from keystage.bundle.naming import aligned
from keystage.bundle.plan import check_method, check_plan, parameters, roles
from keystage.bundle.source import ModelSource, identity_of, open_source
from keystage.bundle.stack_yml import STACK_FILE, stack_yml
from keystage.bundle.stage_file import write_stages
from keystage.models.base import Family, StageRole
from keystage.models.families import family_of
from keystage.models.single_pass import SinglePassFamily
from keystage.wire.unreadable import UNREADABLE

SPLIT_FILE = "split.json"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?")


class SplitRecord(msgspec.Struct, frozen=True):
    """How a bundle was made.

    Attributes:
        key: digest of what it was made from and how, to tell whether it can be used again.
        partitioner: who chose the layers of each stage: `keystage`, or `deepspeed` with its version.
    """

    key: str
    partitioner: str = ""


def split(
    source: str | os.PathLike[str],
    stages: int,
    method: str,
    out: str | os.PathLike[str],
    name: str,
    dtype: str = "fp32",
    force: bool = False,
    profile: str | os.PathLike[str] | None = None,
) -> Path:
    """Splits a model into a bundle.

    Args:
        source: see `keystage.bundle.source.open_source`.
        stages: number of stages, 1 to the number of layers.
        method: `uniform`, `parameters` or `time`.
        out: folder of the bundle; a bundle there made the same way from the same model is used
            again, any other bundle there is replaced.
        name: pipeline name: lower-case letters, digits, dashes.
        dtype: `fp32`, `bf16` or `fp16`.
        force: makes the bundle again even if it is there.
        profile: for `time`, a profiled bundle of the same model, whose stages tell the time of layers and
            ends (`models.profiled_time`); None: one layer of each kind and the ends are measured here.

    Returns:
        The bundle's folder, absolute.

    Raises:
        SplitError: the model or a wish is at fault; nothing was written.
        BundleError: the profiled bundle is damaged.
    """
    kind = full_name(dtype)
    check_method(method)
    seconds = None if profile is None else _profiled_seconds(profile, method)
    check_name(name)
    if stages < 1:
        raise SplitError(f"stages must be at least 1, got {stages}")
    folder = Path(out).resolve()
    facts = [BUNDLE_VERSION, identity_of(source), stages, method, name, kind]
    facts += [] if seconds is None else [seconds]
    key = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
    if not force and _is_made(folder, key):
        return folder
    check_place(folder)
    with new_folder(folder) as partial:
        pipeline, chosen_by = _write_parameters(
            open_source(source), stages, method, partial, name, kind, seconds
        )
        _write_descriptions(pipeline, partial, folder)
        (partial / SPLIT_FILE).write_bytes(msgspec.json.encode(SplitRecord(key, chosen_by)))
    return folder


def bundle_emulated(
    name: str,
    stages: int,
    execution: Execution,
    activation_bytes: int,
    context_length: int,
    out: str | os.PathLike[str],
) -> Path:
    """Writes the bundle of an emulated pipeline: `pipeline.json` and `stack.yml`, no parameters.

    Args:
        name: pipeline name.
        stages: number of stages.
        execution: `looping` or `single-pass`.
        activation_bytes: bytes per row from stage to stage.
        context_length: token positions per session.
        out: folder of the bundle; replaced if it is a bundle.

    Raises:
        SplitError: impossible wish, or `out` holds something else.
    """
    check_name(name)
    for word, value in (("stages", stages), ("activation_bytes", activation_bytes)):
        if value < 1:
            raise SplitError(f"{word} must be at least 1, got {value}")
    if execution == "looping" and context_length < 1:
        raise SplitError(f"context_length must be at least 1, got {context_length}")
    folder = Path(out).resolve()
    check_place(folder)
    pipeline = emulated(
        name, stages, execution=execution, activation_bytes=activation_bytes, context_length=context_length
    )
    with new_folder(folder) as partial:
        _write_descriptions(pipeline, partial, folder)
    return folder


def _write_parameters(
    opened: ModelSource,
    stages: int,
    method: str,
    partial: Path,
    name: str,
    dtype: str,
    seconds: list[float] | None,
) -> tuple[Pipeline, str]:
    config = opened.config()
    family = family_of(config)
    shape = family.shape(config)
    parts, chosen_by = roles(family, config, stages, method, dtype, seconds)
    plan = [family.stage_tensors(config, role) for role in parts]
    opened = aligned(opened, {tensor.source for tensors in plan for tensor in tensors})
    check_plan(plan, opened.shapes(), functools.partial(family.is_derived, config))
    check_room(partial, sum(parameters(tensors) for tensors in plan) * ITEM_BYTES[dtype])
    vocabulary = opened.write_vocabulary(partial)
    specs: list[StageSpec] = []
    for index, file in enumerate(write_stages(opened, plan, partial, dtype)):
        chunks = file_chunks(file)
        specs.append(
            StageSpec(
                index=index,
                file=file.name,
                layers=(parts[index].first_layer, parts[index].end_layer),
                parameters=parameters(plan[index]),
                nbytes=file.stat().st_size,
                chunks=chunks,
                identity=identity(chunks, dtype),
                activation_bytes=_activation_elements(family, config, parts[index]) * ITEM_BYTES[dtype],
            )
        )
    pipeline = Pipeline(
        version=BUNDLE_VERSION,
        name=name,
        family=family.name,
        execution=family.execution,
        dtype=dtype,
        config=_without_derived(config),
        stages=specs,
        edges=_edges(stages, family.execution),
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        eos=list(vocabulary.eos) or _eos(config),
        bos=vocabulary.bos,
        tokenizer=vocabulary.file,
        chat_template=vocabulary.chat_template,
        special_tokens=vocabulary.special_tokens,
        source=opened.words,
    )
    return pipeline, chosen_by


def _profiled_seconds(profile: str | os.PathLike[str], method: str) -> list[float]:
    """Seconds of each layer by a profiled bundle, the ends counted in."""
    if method != "time":
        raise SplitError(f"a profile is for method time, the method is {method}")
    from keystage.models.profiled_time import part_times

    times = part_times(store.load(profile))
    return partition.with_ends(times.layers_s, times.embedding_s, times.head_s)


def _activation_elements(family: Family, config: dict[str, Any], role: StageRole) -> int:
    """Elements of a token's activation, or of the largest item that a single-pass stage hands on."""
    if isinstance(family, SinglePassFamily):
        return family.activation_elements(config, role.end_layer)
    return family.shape(config).hidden_size


def _edges(stages: int, execution: Execution) -> list[tuple[int, int]]:
    """The stages in a row; in a looping pipeline the last one leads back to the first."""
    row = [(index, index + 1) for index in range(stages - 1)]
    return [*row, (stages - 1, 0)] if execution == "looping" else row


def _write_descriptions(pipeline: Pipeline, partial: Path, folder: Path) -> None:
    store.write(partial, pipeline)
    (partial / STACK_FILE).write_text(stack_yml(pipeline, folder), encoding="utf-8")


def _without_derived(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what the split has changed (`dtype`) or what is of no use here."""
    dropped = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")
    return {key: value for key, value in config.items() if key not in dropped}


def _eos(config: dict[str, Any]) -> list[int]:
    found = config.get("eos_token_id")
    values = found if isinstance(found, list) else [found]
    return [value for value in values if isinstance(value, int)]


def check_name(name: str) -> None:
    """Refuses a pipeline name that no function can have.

    Raises:
        SplitError: names the rule.
    """
    if not _NAME.fullmatch(name):
        raise SplitError(f"name {name!r} must be 1 to 42 lower-case letters, digits and dashes")


def _is_made(folder: Path, key: str) -> bool:
    """Whether the folder holds a complete bundle made from the same model in the same way."""
    try:
        record = msgspec.json.decode((folder / SPLIT_FILE).read_bytes(), type=SplitRecord)
        if record.key != key:
            return False
        pipeline = store.load(folder)
        for stage in pipeline.stages:
            store.check_size(folder, stage)
    except (OSError, BundleError, *UNREADABLE):
        return False
    return not pipeline.tokenizer or (folder / pipeline.tokenizer).is_file()
