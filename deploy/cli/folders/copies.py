"""`sidecar adapters diff` and `export`: read versions from the store, and their folders."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import Project, settings_of
from deploy.cli.output import Output, note, print_found, require_store, say, say_json

if TYPE_CHECKING:
    from deploy.adapters.weights import ModuleChange
    from deploy.records import AdapterVersion
    from sidecar.settings import Settings

VersionA = Annotated[str, typer.Argument(metavar="A", help="a version, an alias or a full name")]
VersionB = Annotated[str, typer.Argument(metavar="B", help="the other one")]


def adapters_diff(
    context: typer.Context,
    a: VersionA,
    b: VersionB,
    project: Project = None,
    output: Output = "text",
) -> None:
    """In what two versions differ: descent, config, training data, weights module by module."""
    from dataclasses import asdict

    from deploy.adapters import diff as differences
    from deploy.errors import UnknownAdapterError
    from deploy.registry.lineage import trace_lineage
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database, database.read() as session:
        first, second = (trace_lineage(session, settings.line.name, one) for one in (a, b))
    for one, reference in ((first, a), (second, b)):
        if not one.steps:
            raise UnknownAdapterError(f"{reference} is the base model, which has no files here")
    version_a, version_b = first.steps[0].adapter, second.steps[0].adapter
    modules, why = _compared(version_a, version_b)
    configs = _config(settings, version_a), _config(settings, version_b)
    found = differences.AdapterDiff(
        a=version_a.name,
        b=version_b.name,
        same_files=version_a.digest == version_b.digest,
        descent=differences.compare_descent(first, second),
        config=differences.differing(*configs),
        settings=differences.differing(
            differences.settings_of_run(first), differences.settings_of_run(second)
        ),
        data=differences.compare_data(first, second),
        modules=tuple(modules),
        not_compared=why,
    )
    if output == "json":
        say_json(asdict(found))
        return
    for line in differences.render(found).split("\n"):
        say(line)


def _compared(a: AdapterVersion, b: AdapterVersion) -> tuple[list[ModuleChange], str]:
    """Compare the weights. Returns: nothing and the reason where that cannot be done."""
    from deploy.adapters.weights import compare_weights, open_lora
    from deploy.errors import InvalidAdapterError

    for one in (a, b):
        if one.removed_at is not None:
            return [], f"the folder of v{one.version} was removed (adapters.folder_days)"
    try:
        return compare_weights(open_lora(Path(a.path)), open_lora(Path(b.path))), ""
    except ImportError:
        return [], "numpy is not installed (`pip install numpy`)"
    except (InvalidAdapterError, OSError) as error:
        return [], str(error)


def _config(settings: Settings, version: AdapterVersion) -> dict[str, Any]:
    """Read a version's config, of a removed one what is left; empty when it cannot be read."""
    from deploy.adapters.prune import removed_documents
    from deploy.adapters.weights import read_config
    from deploy.errors import InvalidAdapterError
    from learner.adapter_folder import CONFIG, open_file, open_folder

    folder = Path(version.path)
    if version.removed_at is not None:
        folder = removed_documents(settings.learner.adapters_dir, version.digest)
    try:
        with open_folder(folder) as descriptor, open_file(descriptor, CONFIG) as file:
            return read_config(file)
    except (InvalidAdapterError, OSError) as error:
        note(f"{folder}: {error}; its config is not compared")
        return {}


def adapters_export(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="a version, an alias or a full name")],
    target: Annotated[Path, typer.Argument(help="a new folder, or a new file that ends in .tar")],
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="the optimiser's moments too")
    ] = False,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Write a version as a standard PEFT folder, or a tar of one, whose digest is checked."""
    from deploy.adapters.export import ExportError, export_version, version_in_files
    from sidecar.store.database import Database

    settings = settings_of(context, project)
    require_store(settings.store.url)
    with closing(Database(settings.store.url)) as database, database.read() as session:
        found = version_in_files(session, settings.line.name, version)
    try:
        files = export_version(found, target, with_optimizer=with_optimizer)
    except OSError as error:
        raise ExportError(
            f"{error.filename or target}: {error.strerror}; free space or name another place"
        ) from error
    shown = {"adapter": found.name, "digest": found.digest, "to": str(target), "files": list(files)}
    print_found(shown, output)
