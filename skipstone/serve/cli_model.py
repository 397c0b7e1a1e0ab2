"""Loading a model for a verb of the command line, and saying on standard error what was loaded and chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from skipstone.models.locate import locate
from skipstone.serve.cli_options import Settings
from skipstone.serve.cli_output import note, sampling_line, show_card

if TYPE_CHECKING:
    from skipstone.core.observer import Observer
    from skipstone.llm import LLM


@contextmanager
def open_model(settings: Settings, quiet: bool, observer: Observer | None = None) -> Iterator[tuple[LLM, Settings]]:
    """The loaded model, and the settings with its own sampling defaults; closed at the end, whatever happens.

    Raises CheckpointError, ConfigError or UnsupportedError for a model that cannot be loaded.
    """
    config = settings.engine_config()
    folder = locate(config.model)
    if not quiet:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        note(f"loading {folder} ({size / 1e6:,.1f} MB of weights)")
    from skipstone.llm import LLM  # torch takes seconds to import; errors in options and prompts come before

    llm = LLM(config=config, observer=observer)
    samples = "temperature" in settings.values  # a verb without sampling options leaves them to its clients
    try:
        settings = settings.with_checkpoint(llm.default_params)
        if not quiet:
            show_card(llm.card, f"skipstone: {config.model}")
            if samples:
                note(sampling_line(settings))
        yield llm, settings
    finally:
        llm.close()


def with_generation_config(settings: Settings) -> Settings:
    """The settings with the sampling defaults of the checkpoint they name, without loading it.

    Raises CheckpointError for a folder or a file that cannot be read.
    """
    if settings.values["model"] is msgspec.NODEFAULT:
        return settings
    path = locate(settings.engine_config().model) / "generation_config.json"
    if not path.exists():
        return settings
    from skipstone.llm import SAMPLING_KEYS
    from skipstone.models.loader import read_json

    generation = read_json(path, "it may be deleted")
    return settings.with_checkpoint({key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None})
