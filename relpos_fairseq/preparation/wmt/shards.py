"""What a shard leaves for the run that joins all of them."""

from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import Hashes, read_json
from relpos_fairseq.engine.manifest import describe_files, labelled, versions, write_manifest
from relpos_fairseq.engine.stages import Stage
from relpos_fairseq.preparation.wmt.clean import add_counts
from relpos_fairseq.preparation.wmt.files import WmtFiles
from relpos_fairseq.preparation.wmt.local import Texts

MANIFEST = "manifest.json"
STAGES = ("clean", "tokenise")  # of a shard


def write(files: WmtFiles, texts: Texts, command: Sequence[str], counts: dict, hashes: Hashes) -> None:
    """Write a shard's manifest."""
    settings = files.settings
    shard = settings.shard
    write_manifest(
        files.shard_folder(shard) / MANIFEST,
        command=command,
        inputs=texts.paths(),
        outputs=outputs(files, shard),
        stages={name: counts[name] for name in STAGES if name in counts},
        extra={"settings": settings.cleaning(), "shard": [shard, settings.shards]},
        hashes=hashes,
    )
    print(f"shard {shard} of {settings.shards} is ready; join all with --merge {settings.shards}", flush=True)


def stage(files: WmtFiles, texts: Texts, hashes: Hashes) -> Stage:
    """Return the stage that checks the shards; its counts are the sum of theirs, by stage."""
    settings = files.settings
    shards = range(1, settings.shards + 1)
    made = [files.shard_folder(shard) / MANIFEST for shard in shards]
    made += [path for shard in shards for path in outputs(files, shard)]
    there = [path for path in made if path.is_file()]
    asked = settings.cleaning() | {"shards": settings.shards}
    return Stage("shards", lambda: read(files, texts, hashes), [*texts.paths(), *there], [], asked)


def read(files: WmtFiles, texts: Texts, hashes: Hashes) -> dict[str, dict]:
    """Return the sum of all shards' counts, by stage.

    Raises:
        PreparationError: A shard is missing, was made with other settings, by other versions or of
            other text, or was changed or left unfinished since.
    """
    settings = files.settings
    wanted = {**settings.cleaning(), "languages": [*settings.languages]}
    total: dict[str, dict] = {"clean": {}}
    inputs = describe_files(labelled(texts.paths(), None), hashes)
    for shard in range(1, settings.shards + 1):
        path = files.shard_folder(shard) / MANIFEST
        manifest = read_json(path)
        option = f"--shard {shard}/{settings.shards}"
        if manifest is None:
            raise PreparationError(f"{path} is missing: run with {option} first")
        for key, value in wanted.items():
            if manifest["settings"].get(key) != value:
                raise PreparationError(
                    f"{path} was made with {key} {manifest['settings'].get(key)}, now it is "
                    f"{value}: run {option} again with these options"
                )
        again = f"run {option} again"
        if others := other_versions(manifest["versions"]):
            raise PreparationError(
                f"{path} was made by other versions than are installed here ({others}): install "
                f"the same everywhere, or {again}"
            )
        if manifest["inputs"] != inputs:
            raise PreparationError(f"{path} was made of other text than is there now: {again}")
        # A shard that was begun again and cut off has a manifest of what is no longer there.
        paths = labelled(outputs(files, shard), path.parent)
        whole = all(file.is_file() for file in paths.values())
        if not whole or manifest["outputs"] != describe_files(paths, hashes):
            raise PreparationError(f"{path} is not of the files beside it: {again}")
        add_shard(total, manifest["stages"])
    return total


def other_versions(shard: dict[str, str]) -> str:
    """Say which packages had other versions where a shard was made; "" where none had."""
    here = versions()
    return ", ".join(
        f"{name} {shard.get(name, 'absent')}, here {here.get(name, 'absent')}"
        for name in sorted(shard | here)
        if shard.get(name) != here.get(name)
    )


def outputs(files: WmtFiles, shard: int) -> list[Path]:
    """Return what a shard makes."""
    return list(dict.fromkeys([*files.cleaned(shard), *files.ready(shard)]))


def add_shard(total: dict[str, dict], stages: dict[str, dict]) -> None:
    """Add a shard's counts."""
    for name, counts in stages["clean"].items():
        add_counts(total["clean"].setdefault(name, {}), counts)
    for key, number in stages.get("tokenise", {}).items():
        tokens = total.setdefault("tokenise", {})
        tokens[key] = tokens.get(key, 0) + number
