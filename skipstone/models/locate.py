"""Where a model named on the command line lies: a checkpoint folder, or one of the demos that ship with the project."""

from __future__ import annotations

from pathlib import Path

from skipstone.errors import CheckpointError, ConfigError
from skipstone.registry import PROPOSERS

DEMOS = ("demo", "demo-dsa")
_PACKAGE = Path(__file__).resolve().parent.parent


def locate(model: str) -> Path:
    """Return the folder of a checkpoint. A folder wins over a demo of the same name.

    Raises CheckpointError that says what was looked for: an absent folder, a folder without config.json, a single file.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() and (model not in DEMOS or (folder / "config.json").is_file()):
        if (folder / "config.json").is_file():
            return folder
        # The commonest slip: naming the folder that holds several checkpoints.
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        hint = f"; it holds {', '.join(inside[:5])}: name one of these" if inside else "; is it a complete checkpoint?"
        raise CheckpointError(f"{folder} has no config.json{hint}")
    if folder.is_file():
        raise CheckpointError(f"model={model} is a file; name the folder that holds config.json and *.safetensors")
    if model in DEMOS:
        file, looked = _shipped(f"{model}/config.json")
        if file is None:
            raise CheckpointError(f"model={model}: this demo checkpoint is not installed; looked for {looked}")
        return file.parent
    raise CheckpointError(
        f"model={model} is neither a folder ({folder.absolute()} does not exist) nor a demo; nothing is downloaded: "
        f"name a checkpoint folder on this machine, or one of {', '.join(DEMOS)}"
    )


def shipped_prompts() -> Path:
    """The held-out prompts that ship with the project, four kinds of text. Raises CheckpointError without them."""
    file, looked = _shipped("prompts.jsonl")
    if file is None:
        raise CheckpointError(f"the shipped prompts are not installed; looked for {looked}; pass --prompts FILE")
    return file


def heads_beside(folder: Path) -> dict[str, Path]:
    """Draft heads and draft models that lie beside a model's folder, by method: MODEL-eagle3, MODEL-dflash."""
    model = folder.resolve()
    places = {method: model.with_name(f"{model.name}-{method}") for method, row in PROPOSERS.items() if row.heads}
    return {method: place for method, place in places.items() if (place / "config.json").is_file()}


def head_folder(method: str, named: str | None, model: Path) -> Path:
    """The folder of a draft head or draft model: the one that is named, else the one beside the model's folder.

    Raises ConfigError when none is named, CheckpointError for one that is not there.
    """
    if named is None:
        beside = heads_beside(model).get(method)
        if beside is None:
            raise ConfigError(
                f"spec={method} needs a folder: pass {method}:FOLDER:K (none lies beside the model as "
                f"{model.name}-{method})"
            )
        return beside
    try:
        return locate(named)
    except CheckpointError as error:
        raise CheckpointError(f"spec={method}: {error}") from None


def _shipped(name: str) -> tuple[Path | None, str]:
    """What ships with the project, if it is here, and where it was looked for."""
    # A source tree keeps the checkpoints beside the package, a wheel carries them inside it.
    places = [folder / "checkpoints" / name for folder in (_PACKAGE.parent, _PACKAGE)]
    return next((place for place in places if place.is_file()), None), " and ".join(map(str, places))
