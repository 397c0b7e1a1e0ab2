"""Loading a model for a verb of the command line, and saying on standard error what was loaded and chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skipstone.cli.options import Settings
from skipstone.cli.output import note, sampling_line, show_card
from skipstone.config import EngineConfig
from skipstone.core.request import SamplingParams
from skipstone.errors import RequestError
from skipstone.models.locate import head_folder, locate
from skipstone.runtime.k_table import asked_spec
from skipstone.spec_config import needs_folder

if TYPE_CHECKING:
    from skipstone.core.observer import Observer
    from skipstone.llm import LLM


@contextmanager
def open_model(settings: Settings, quiet: bool, observer: Observer | None = None) -> Iterator[tuple[LLM, Settings]]:
    """The loaded model, and the settings with its own sampling defaults; closed at the end, whatever happens.

    Raises CheckpointError, ConfigError or UnsupportedError for a model that cannot be loaded.
    """
    config = settings.engine_config()
    folder = check_engine(config)
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


def check_engine(config: EngineConfig) -> Path:
    """The model's folder, after what can be told without loading it: the spec, its files, the device, the kernels.

    Raises what loading would raise.
    """
    folder = locate(config.model)
    spec, _ = asked_spec(config)
    if needs_folder(spec.method) and spec.k != 0:
        head_folder(spec.method, spec.folder, folder)
    if config.device != "auto" or config.kernels != "auto":
        from skipstone.kernels.dispatch import choose_device, choose_dtype, choose_ops

        device = choose_device(config.device)
        choose_ops(device, config.kernels, config.exact, choose_dtype(config.dtype, device))
    return folder


def check_params(config: EngineConfig, folder: Path, params: Sequence[SamplingParams]) -> None:
    """Raise RequestError for more drafts than the spec names, and for a grammar that the tokenizer cannot follow.

    What the spec leaves to the model is known with the model.
    """
    spec, _ = asked_spec(config)
    most = 0 if spec.method == "off" else spec.k
    for chosen in params:
        if most is not None and (chosen.num_speculative_tokens or 0) > most:
            raise RequestError(
                f"num_speculative_tokens={chosen.num_speculative_tokens} is more than the {most} of "
                f"spec={config.spec!r}; start it with a larger k in --spec"
            )
    wanted = [chosen for chosen in params if chosen.structured_output is not None]
    if not wanted:
        return
    from skipstone.llm import GenerationConfig
    from skipstone.models.loader import read_model_info
    from skipstone.text.structured import GrammarCompiler

    info = read_model_info(folder)
    grammars = GrammarCompiler(folder, info.config.vocab_size, GenerationConfig(folder).eos_token_ids(info))
    for chosen in wanted:
        grammars.compile(chosen)


def with_generation_config(settings: Settings) -> Settings:
    """The settings with the sampling defaults of the checkpoint they name, without loading it.

    Raises CheckpointError for a folder or a file that cannot be read.
    """
    if settings.values["model"] is msgspec.NODEFAULT:
        return settings
    from skipstone.llm import GenerationConfig

    return settings.with_checkpoint(GenerationConfig(locate(settings.engine_config().model)).sampling)
