"""Engine options: one definition from which flags, SKIPSTONE_ variables and YAML keys are made.

`EngineConfig` is frozen. What a field may be is checked once, in `make_config`; what depends on the checkpoint (block
size, context length) is resolved by the engine when it has read the checkpoint. `options_of` describes the fields of
any options struct; flags, variables, YAML keys and messages are made from it.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, inspect

from skipstone.errors import ConfigError
from skipstone.spec_config import SpecConfig, forms, parse_spec, read_rates

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Kernels = Literal["auto", "reference", "triton", "numba"]
DraftSampling = Literal["coupled", "greedy", "independent"]
IndexKeys = Literal["model", "fp8"]
Rule = Literal["exact", "rejection", "block"]
PositiveInt = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=1024)]  # far more end the process in the libraries that start them
PositiveFloat = Annotated[float, Meta(gt=0)]

VARIABLE_PREFIX = "SKIPSTONE_"
Kind = Literal["flag", "integer", "number", "choice", "text", "texts", "integers", "biases"]
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the engine; `None` means: chosen at start-up from the checkpoint and the machine, and printed."""

    model: Annotated[str, Meta(description="checkpoint folder, or demo / demo-dsa")]
    dtype: Annotated[Dtype, Meta(description="weights and activations; auto: float32 on a CPU, else bfloat16")] = "auto"
    device: Annotated[Device, Meta(description="where the model runs; cuda: NVIDIA or AMD")] = "auto"
    kernels: Annotated[Kernels, Meta(description="ops; auto: Triton on a GPU, Numba on a CPU")] = "auto"
    cuda_graphs: Annotated[bool, Meta(description="GPU: whole decode steps as graphs")] = True
    overlap: Annotated[bool, Meta(description="GPU: prepare the next step while one runs")] = True
    exact: Annotated[bool, Meta(description="bit-equal logits whatever else runs in the step")] = True
    max_model_len: Annotated[PositiveInt | None, Meta(description="longest prompt plus output, in tokens")] = None
    max_num_seqs: Annotated[PositiveInt, Meta(description="most requests in one step")] = 64
    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        Meta(description="most rows in a step, prompts run in chunks; none: 512 on a CPU, 2048 on a GPU"),
    ] = None
    max_decode_delay: Annotated[
        PositiveFloat | None,
        Meta(description="milliseconds that a step with rows of prompts may hold up decoding requests; none: any"),
    ] = None
    block_size: Annotated[PositiveInt | None, Meta(description="tokens per cache block")] = None
    num_blocks: Annotated[PositiveInt | None, Meta(description="cache blocks; default: from cache_memory_gb")] = None
    cache_memory_gb: Annotated[PositiveFloat | None, Meta(description="memory for all caches")] = None
    prefix_caching: Annotated[bool, Meta(description="reuse cached blocks of equal prompt beginnings")] = True
    index_keys: Annotated[
        IndexKeys,
        Meta(description="cached index keys of DeepSeek-V3.2 and its MTP modules; model: in dtype"),
    ] = "model"
    spec: Annotated[str, Meta(description="proposer and drafts per step: " + forms())] = "auto"
    draft_sampling: Annotated[
        DraftSampling | None, Meta(description="noise of drafts; none: coupled where verification is exact")
    ] = None
    verification: Annotated[
        Rule | None, Meta(description="acceptance; all but exact change the text, not its distribution; none: exact")
    ] = None
    simulate_acceptance: Annotated[
        str | None, Meta(description="for benchmarks: accept by these rates per position, as in 0.8,0.6; text is void")
    ] = None
    k_table: Annotated[str | None, Meta(description="file with the best k per batch size, written by tune")] = None
    num_threads: Annotated[Threads | None, Meta(description="CPU threads; default: torch's own choice")] = None


class Option(msgspec.Struct, frozen=True):
    """One field of an options struct, with what flags, variables, YAML keys and error messages need to know of it."""

    name: str
    kind: Kind
    nullable: bool
    default: Any  # msgspec.NODEFAULT: the option must be given
    allowed: str
    help: str
    type: Any
    reader: Callable[[str], Any]

    @property
    def flag(self) -> str:
        """Its command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return VARIABLE_PREFIX + self.name.upper()

    def check(self, value: object, source: str = "") -> Any:
        """Return the value in the field's type; text from a `source` (a flag, a variable, a file) is read first.

        Raises ConfigError naming the option, the value and what is allowed.
        """
        try:
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            if isinstance(value, str) and self.kind == "choice":
                value = None if self.nullable and value.lower() == "none" else value
            elif isinstance(value, str) and source and self.kind not in ("text", "texts"):
                value = self.read(value)
            checked = msgspec.convert(value, self.type, str_keys=True)
            if self.kind == "number" and checked is not None and not math.isfinite(checked):
                raise ValueError(value)
        except (msgspec.ValidationError, ValueError, TypeError):
            where = f" (from {source})" if source else ""
            shown = value if isinstance(value, str) and source else repr(value)
            raise ConfigError(f"{self.name}={shown}{where} must be {self.allowed}") from None
        return checked

    def read(self, text: str) -> Any:
        """Turn text into a value, without checking its range. Raises ValueError for text of another kind."""
        return None if self.nullable and text.lower() in ("none", "auto") else self.reader(text)


def read_integer(text: str) -> int:
    """Read a whole number; k, m, g multiply by powers of 1000 and K, M, G by powers of 1024. Raises ValueError."""
    text = text.strip().replace("_", "")
    factor = _SUFFIXES.get(text[-1:], 1)
    if factor == 1:
        return int(text)
    value = float(text[:-1]) * factor
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def _read_biases(text: str) -> dict[int, float]:
    pairs = [part.split("=") for part in text.split(",")]
    biases = {int(token): float(bias) for token, bias in pairs}
    if len(biases) < len(pairs):
        raise ValueError(text)
    return biases


# By the types that a field takes beside None: its kind, what is allowed in words, and how text is read. Readers raise
# ValueError, and leave ranges to be checked.
_KINDS: dict[tuple[type[inspect.Type], ...], tuple[Kind, str, Callable[[str], Any]]] = {
    (inspect.BoolType,): ("flag", "true or false", lambda text: _BOOLEANS.get(text.lower(), text)),
    (inspect.IntType,): ("integer", "a whole number", read_integer),
    (inspect.FloatType,): ("number", "a number", float),
    (inspect.LiteralType,): ("choice", "one of ", str),
    (inspect.StrType,): ("text", "text", str),
    (inspect.StrType, inspect.ListType): ("texts", "text or a list of texts", lambda text: [text]),
    (inspect.ListType,): ("integers", "a list of whole numbers", lambda text: [*map(read_integer, text.split(","))]),
    (inspect.DictType,): (
        *("biases", "a map from token id to number, no id twice (on the command line ID=BIAS)", _read_biases),
    ),
}


@functools.cache
def options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """Every field of an options struct as an Option, in the order of definition."""
    info = inspect.type_info(struct)
    types = get_type_hints(struct, include_extras=True)
    assert isinstance(info, inspect.StructType)
    return {field.name: _option(field, types[field.name]) for field in info.fields}


def _option(field: inspect.Field, declared: Any) -> Option:
    node, text = field.type, ""
    if isinstance(node, inspect.Metadata):
        text = (node.extra_json_schema or {}).get("description", "")
        node = node.type
    members = list(node.types) if isinstance(node, inspect.UnionType) else [node]
    values = [member for member in members if not isinstance(member, inspect.NoneType)]
    nullable = len(values) < len(members)
    kind, allowed, reader = _KINDS[tuple(map(type, values))]
    match values[0]:
        case inspect.LiteralType(values=names):
            allowed += ", ".join(map(str, names))
        case inspect.IntType() | inspect.FloatType() as number:
            allowed += _bounds(number)
    allowed += " or none" if nullable else ""
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return Option(field.name, kind, nullable, default, allowed, text, declared, reader)


def _bounds(node: inspect.IntType | inspect.FloatType) -> str:
    if node.ge is not None and node.le is not None:
        return f" from {node.ge} to {node.le}"
    least = f" of at least {node.ge}" if node.ge is not None else f" above {node.gt}" if node.gt is not None else ""
    return least + (f" and at most {node.le}" if node.le is not None else "")


def unknown_option(name: str, known: Iterable[str], kind: str = "option", source: str = "") -> ConfigError:
    """The error for a name that is no option: it says which known name is nearest, or lists them all."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "known: " + ", ".join(names)
    where = f" (from {source})" if source else ""
    return ConfigError(f"no {kind} {name!r}{where}; {hint}")


def make_config(**options: object) -> EngineConfig:
    """Check options against the definition.

    Raises ConfigError naming the option, its value and what is allowed; for an unknown option, the nearest known one.
    """
    known = options_of(EngineConfig)
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_option(name, known)
        checked[name] = known[name].check(value)
    if "model" not in checked:
        raise ConfigError("model is missing: name a checkpoint folder, or one of the demos: demo, demo-dsa")
    config = EngineConfig(**checked)
    read_spec(config)
    return config


# Options that a JSON object in `spec` may set as well, and its key for each.
_ALSO_IN_SPEC = {
    "draft_sampling": ("draft_sampling", "draft_sample_method"),
    "verification": ("verification", "rejection_sample_method"),
    "simulate_acceptance": ("acceptance_rates", "synthetic_acceptance_rates or _length"),
}


def read_spec(config: EngineConfig) -> SpecConfig:
    """The `spec` option, with rates from `simulate_acceptance`.

    Raises ConfigError for one that cannot be read, or that sets what an option sets too.
    """
    spec = parse_spec(config.spec)
    for option, (field, key) in _ALSO_IN_SPEC.items():
        value = getattr(config, option)
        if value is not None and getattr(spec, field) is not None:
            raise ConfigError(
                f"{option}={value} and {key} in spec={config.spec!r} set the same thing; keep one of them"
            )
    if config.simulate_acceptance is not None:
        spec = msgspec.structs.replace(spec, acceptance_rates=read_rates(config.simulate_acceptance))
    return spec
