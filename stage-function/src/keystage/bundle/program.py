"""`keystage split program:PATH`: from a stream program to a bundle, a stage for each module.

The program's code stays where it is: `pipeline.json` names it (`package.module:function` and options), and
holds the graph, so that the router needs no code at all. Each module's parameters are one safetensors file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystage.bundle import store
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageProfile, StageSpec
from keystage.bundle.errors import SplitError
from keystage.bundle.folder import check_place, check_room, new_folder
from keystage.bundle.hashing import file_chunks, identity
from keystage.bundle.stack_yml import STACK_FILE, stack_yml
from keystage.streams.graph import ProgramReference

if TYPE_CHECKING:
    import torch

    from keystage.streams.api import Program, StreamModule

PREFIX = "program:"
BUILT_IN = "keystage.streams.programs"


def program_path(source: str) -> str:
    """The import path that a source names: `program:diffusion` is the ready program of that name.

    Args:
        source: with or without `program:` in front.
    """
    path = source.removeprefix(PREFIX)
    return path if ":" in path else f"{BUILT_IN}.{path}:program"


def bundle_program(
    source: str,
    out: str | os.PathLike[str],
    name: str = "",
    options: Mapping[str, Any] | None = None,
    handler: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the bundle of a stream program.

    Args:
        source: `program:` and the name of a ready program, or `package.module:function`.
        out: folder of the bundle; replaced if it is a bundle.
        name: pipeline name, empty: the program's own.
        options: keyword arguments of the function.
        handler: folder of the user's code, for paths that are not built in.

    Returns:
        The bundle's folder, absolute.

    Raises:
        SplitError: no such program, or one that a bundle cannot hold.
    """
    from keystage.bundle.split import check_name
    from keystage.models.program import FAMILY, config_of
    from keystage.streams.api import ProgramError
    from keystage.streams.graph_checks import GraphError
    from keystage.streams.handler import open_allowed

    path = program_path(source)
    given = dict(options or {})
    try:
        program = open_allowed(path, given, handler)
        parameters = [dict(module.parameters()) for module in program.modules.values()]
    except (ProgramError, GraphError) as error:
        raise SplitError(f"{source}: {error}") from error
    check_name(name or program.name)
    folder = Path(out).resolve()
    check_place(folder)
    config = config_of(list(parameters))
    dtype = _dtype(parameters)
    with new_folder(folder) as partial:
        check_room(partial, sum(tensor.nbytes for tensors in parameters for tensor in tensors.values()))
        stages = [
            _stage(partial, index, module, tensors, dtype)
            for index, (module, tensors) in enumerate(zip(program.modules.values(), parameters, strict=True))
        ]
        pipeline = Pipeline(
            version=BUNDLE_VERSION,
            name=name or program.name,
            family=FAMILY,
            execution="program",
            dtype=dtype,
            config=config,
            stages=stages,
            edges=_edges(program),
            context_length=0,
            vocab_size=0,
            hidden_size=0,
            eos=[],
            source=f"stream program {path}",
            graph=program.graph,
            program=ProgramReference(path, given),
        )
        store.write(partial, pipeline)
        (partial / STACK_FILE).write_text(stack_yml(pipeline, folder), encoding="utf-8")
    return folder


def _stage(
    folder: Path, index: int, module: StreamModule, tensors: Mapping[str, torch.Tensor], dtype: str
) -> StageSpec:
    from safetensors.torch import save_file

    file = folder / f"stage-{index:02d}.safetensors"
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    chunks = file_chunks(file)
    known = module.profile
    return StageSpec(
        index=index,
        file=file.name,
        layers=(index, index + 1),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        nbytes=file.stat().st_size,
        chunks=chunks,
        identity=identity(chunks, dtype),
        activation_bytes=0,
        profile=None if known is None else StageProfile("stated", known.alpha_s, known.beta_s),
    )


def _dtype(parameters: list[dict[str, torch.Tensor]]) -> str:
    """The type that all parameters have, `float32` where they differ or are none."""
    kinds = {
        str(tensor.dtype).removeprefix("torch.") for tensors in parameters for tensor in tensors.values()
    }
    return kinds.pop() if len(kinds) == 1 else "float32"


def _edges(program: Program) -> list[tuple[int, int]]:
    from keystage.streams.graph import Routes, successors

    index = Routes(program.graph).stage_of
    return [
        (index[name], index[following])
        for name, names in successors(program.graph).items()
        for following in names
    ]
