"""The keys of rotary embeddings, in both generations of config.json.

Older files say `rope_theta` and, for an extended context, `rope_scaling` with its `type`; files that transformers 5 has
saved hold all of it in `rope_parameters`, with `rope_type`. A file may hold both: what they say must agree.
"""

from __future__ import annotations

from skipstone.errors import ConfigError
from skipstone.layers.rotary import RotarySettings, Yarn
from skipstone.models.config_reader import ConfigReader

SECTIONS = ("rope_parameters", "rope_scaling")
BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # also read beside the sections


def read_rotary(
    reader: ConfigReader, max_position: int, theta: float = 10000.0, partial: bool = False
) -> RotarySettings:
    """Read the rotary keys, `theta` by default; with `partial`, a part of a head rotates, and must be named.

    Other defaults are those of transformers 5. Raises ConfigError for a key that is missing, unknown here, or said
    differently in two places.
    """
    sections = [reader.section(key) for key in SECTIONS if reader.get(key)]
    for section in sections:
        section.also("rope_type", section, "type")
    rope = sections[0] if sections else ConfigReader({}, reader.where)
    for other in sections[1:]:
        for key in [key for key in {**rope.raw, **other.raw} if key not in ("type", *BESIDE)]:
            if rope.get(key) is None:
                other.agree(key, None, rope.place(key))
            rope.agree(key, other.get(key), other.place(key))
    for key in BESIDE:
        for other in (*sections[1:], reader):
            rope.also(key, other, key)
    kind = "default" if rope.get("rope_type") is None else rope.expect("rope_type", ("default", "yarn"))
    share = rope.number("partial_rotary_factor") if partial else rope.expect("partial_rotary_factor", (1,), 1)
    yarn = _read_yarn(rope, max_position) if kind == "yarn" else None
    settings = RotarySettings(rope.number("rope_theta", theta), share, yarn)
    if settings.theta <= 1:
        raise ConfigError(f"{rope.place('rope_theta')}={settings.theta} must be above 1; fix config.json")
    rope.finish(("",), f" with rope_type={kind!r}")
    return settings


def _read_yarn(rope: ConfigReader, max_position: int) -> Yarn:
    def number(key: str, default: float, zero: bool = False) -> float:
        return default if rope.get(key) is None else rope.number(key, zero=zero)

    factor = rope.number("factor")
    mscale, all_dim = number("mscale", 0.0, zero=True), number("mscale_all_dim", 0.0, zero=True)
    usual = Yarn.mscale(factor, mscale) / Yarn.mscale(factor, all_dim) if mscale and all_dim else Yarn.mscale(factor)
    return Yarn(
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings", default=max_position),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=rope.expect("truncate", (True, False), True),
        amplitude=number("attention_factor", usual),
        temperature=Yarn.mscale(factor, all_dim),
    )
