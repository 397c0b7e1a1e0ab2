"""How the keys of config.json are read."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, TypeVar

from skipstone.errors import ConfigError

# Words that begin the keys of what a model computes, and keys among them that only training reads.
WORDS = (
    *("attention_", "attn_logit", "embedding_", "expert", "final_logit", "index", "layernorm_", "logit", "mlp_"),
    *("moe_", "qk_", "residual_", "rope_", "rotary_", "rout", "sliding_", "sparse_", "swiglu_"),
)
TRAINING = ("attention_dropout", "router_aux_loss_coef", "router_jitter_noise")


Config = TypeVar("Config")


def from_key(name: str = "", **options: Any) -> Any:
    """A dataclass field that `ConfigReader.fill` reads: the key, where it is called otherwise, and how it is read."""
    return field(metadata={"key": name, **options})


class ConfigReader:
    """Typed reads from a raw config dictionary; every error names the key, its value and what is expected."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = dict(raw)
        self.where = where
        self.read: set[str] = set()  # keys that somebody asked for
        self.places: dict[str, str] = {}  # of keys whose value was found under another name

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        self.read.add(key)
        return self.raw.get(key, default)

    def place(self, key: str) -> str:
        """Where the value of a key was found, for messages."""
        return self.places.get(key, f"{self.where}: {key}")

    def integer(self, key: str, low: int = 1, default: int | None = None) -> int:
        """An int of at least `low`. Raises ConfigError."""
        value = self._required(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{self.place(key)}={value!r} must be a whole number of at least {low}; fix config.json")
        return value

    def number(self, key: str, default: float | None = None, zero: bool = False) -> float:
        """A finite positive number, or 0 where that is allowed. Raises ConfigError."""
        value = self._required(key, default)
        wrong = not isinstance(value, (int, float)) or isinstance(value, bool)
        if wrong or not 0 <= value < float("inf") or not (value or zero):
            allowed = "a number of at least 0" if zero else "a positive number"
            raise ConfigError(f"{self.place(key)}={value!r} must be {allowed}; fix config.json")
        return float(value)

    def layers(self, key: str, length: int, kinds: tuple[Any, ...] = (0, 1)) -> tuple[bool, ...]:
        """A list with one of some values for each of `length` layers: whether it is the last. Raises ConfigError."""
        value = self._required(key)
        if not isinstance(value, list) or len(value) != length or any(item not in kinds for item in value):
            options = " or ".join(repr(kind) for kind in kinds)
            raise ConfigError(
                f"{self.place(key)}={value!r:.80} must list {options} for each of num_hidden_layers={length}"
            )
        return tuple(item == kinds[-1] for item in value)

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """One of the values we implement. Raises ConfigError."""
        value = self.get(key, default)
        if value not in allowed:
            options = " or ".join(repr(item) for item in allowed)
            raise ConfigError(f"{self.place(key)}={value!r} is not supported, only {options}")
        return value

    def fill(self, kind: type[Config], **found: Any) -> Config:
        """A dataclass of what was found already, and of fields declared by `from_key`. Raises ConfigError."""
        for declared in fields(kind):  # type: ignore[arg-type]
            if "key" in declared.metadata and declared.name not in found:
                options = dict(declared.metadata)
                name = options.pop("key") or declared.name
                read = self.number if declared.type == "float" else self.integer
                found[declared.name] = read(name, **options)
        return kind(**found)

    def section(self, key: str) -> ConfigReader:
        """A nested object. Raises ConfigError."""
        value = self._required(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be an object")
        return ConfigReader(value, f"{self.where}.{key}")

    def multiple(self, key: str, value: int, of_key: str, of: int) -> None:
        """Check that one key is a multiple of another. Raises ConfigError."""
        if value % of:
            raise ConfigError(f"{self.place(key)}={value} must be a multiple of {of_key}={of}; fix config.json")

    def agree(self, key: str, value: Any, place: str) -> None:
        """Raise ConfigError when the key is given and is not the value that follows from another place."""
        own = self.get(key)
        if own is not None and own != value:
            raise ConfigError(
                f"{self.place(key)}={own!r:.80} disagrees with {place}={value!r:.80}; keep what the model was made with"
            )

    def adopt(self, key: str, value: Any, place: str) -> None:
        """Take the value of a key from another place. Raises ConfigError when the key is given and differs."""
        if value is not None:
            self.agree(key, value, place)
            self.raw[key] = value
        if value is not None or key not in self.raw:
            self.places[key] = place

    def also(self, key: str, other: ConfigReader, name: str) -> None:
        """A second name of a key. Raises ConfigError when both are given and differ."""
        self.adopt(key, other.get(name), other.place(name))

    def finish(self, words: tuple[str, ...] = WORDS, when: str = "") -> None:
        """Raise ConfigError for a key that nobody asked for although its name begins with one of the words.

        Such a key names a mechanism that is not here. Keys without any of the words belong to other programs.
        """
        for key, value in self.raw.items():
            if key.startswith(words) and key not in self.read and key not in TRAINING and value is not None:
                raise ConfigError(
                    f"{self.place(key)}={value!r:.80} is not supported{when}: nothing here reads it; take it out if "
                    "the model does not depend on it"
                )

    def _required(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            other = "" if self.place(key) == f"{self.where}: {key}" else f" (or {self.place(key)})"
            raise ConfigError(
                f"{self.where}: key {key!r}{other} is missing; take config.json from the model's own release"
            )
        return value
