"""Options: what is allowed, what the messages say, and which source of a value wins."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from skipstone import LLM
from skipstone.cli.main import load_command
from skipstone.cli.options import TITLES, Command, Parser, Settings, resolve
from skipstone.config import EngineConfig, make_config, options_of, read_integer
from skipstone.core.request import SamplingParams
from skipstone.errors import ConfigError, RequestError
from skipstone.server.api.decode import decode
from skipstone.server.api.errors import ApiError
from skipstone.server.api.requests import body_of


def settings(*arguments: str, environ: dict[str, str] | None = None, verb: str = "generate") -> Settings:
    command = load_command(verb)
    return resolve(command, Parser(verb, command).parse(arguments), environ or {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "no option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1"),
        ({"max_num_seqs": 1.5}, "max_num_seqs=1.5 must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be a whole number of at least 1"),
        ({"max_num_seqs": None}, "max_num_seqs=None must be a whole number of at least 1"),
        ({"exact": "maybe"}, "exact='maybe' must be true or false"),
        ({"max_num_seqs": "3"}, "max_num_seqs='3' must be a whole number of at least 1"),
        ({"max_model_len": "auto"}, "max_model_len='auto' must be a whole number of at least 1 or none"),
        ({"dtype": "float64"}, "dtype='float64' must be one of auto, bfloat16, float32"),
        ({"cache_memory_gb": math.nan}, "cache_memory_gb=nan must be a number above 0 or none"),
        ({"cache_memory_gb": -1}, "cache_memory_gb=-1 must be a number above 0 or none"),
        ({"model": 3}, "model=3 must be text"),
        ({"num_threads": 10**9}, "num_threads=1000000000 must be a whole number from 1 to 1024 or none"),
    ],
)
def test_a_bad_option_is_named_with_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**{"model": "demo"} | options)
    assert str(caught.value) == message


WRONG = {  # by kind: text that a flag may have, and things of other types
    "flag": ["true", "off", 1, 0.0, [], None],
    "integer": ["3", "64K", "none", 2.5, True, [3], {}],
    "number": ["2.5", "none", True, [2.5], {}],
    "choice": [1, True, ["auto"], b"auto"],
    "text": [1, True, ["a"], b"demo", {}],
}


@pytest.mark.parametrize("name", options_of(EngineConfig))
def test_from_python_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    for value in WRONG[options_of(EngineConfig)[name].kind]:
        made = EngineConfig(**{"model": "demo"} | {name: value})  # type: ignore[arg-type]
        for options in ({"config": made}, {"model": "demo"} | {name: value}):
            with pytest.raises(ConfigError, match=rf"^{name}={re.escape(repr(value))} must be "):
                LLM(**options)  # type: ignore[arg-type]


def test_a_config_is_an_engine_config_and_holds_everything() -> None:
    with pytest.raises(ConfigError, match="must be an EngineConfig"):
        LLM(config={"model": "demo"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"holds all options; got \{'max_num_seqs': 3\}"):
        LLM(config=make_config(model="demo"), max_num_seqs=3)


def test_an_unknown_option_without_a_near_one_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"no option 'zzzzzz'; known: model, dtype, .*num_threads"):
        make_config(model="demo", zzzzzz=1)


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        make_config(max_num_seqs=3)


def test_paths_and_whole_values_pass() -> None:
    config = make_config(model=Path("/a"), max_num_seqs=3, cache_memory_gb=2)
    assert (config.model, config.max_num_seqs, config.cache_memory_gb) == ("/a", 3, 2.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("1k", 1000), ("2M", 2 * 2**20), ("8K", 8192), ("1.5k", 1500), ("-1", -1), ("1_000", 1000)],
)
def test_integers_with_suffixes(text: str, value: int) -> None:
    assert read_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "12x", "infk", "nan", "0x10"])
def test_text_that_is_no_integer(text: str) -> None:
    with pytest.raises(ValueError):
        read_integer(text)


@pytest.mark.parametrize("name", options_of(EngineConfig))
def test_every_engine_option_has_flag_variable_key_and_help(name: str, tmp_path: Path) -> None:
    option = options_of(EngineConfig)[name]
    examples = {"flag": "false", "integer": "64", "number": "2.5", "text": "there"}
    examples["choice"] = option.allowed.removeprefix("one of ").split(",")[0]
    example = examples[option.kind]
    value = option.check(example, "test")
    assert option.help
    by_flag = [f"--no-{name.replace('_', '-')}"] if option.kind == "flag" else [option.flag, example]
    assert settings(*by_flag).values[name] == value
    assert settings(*[argument.replace("-", "_").replace("__", "--", 1) for argument in by_flag]).values[name] == value
    assert settings(environ={option.variable: example}).values[name] == value
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {example}\n")
    assert settings("--config", str(file)).values[name] == value


def test_every_sampling_field_has_help() -> None:
    assert all(option.help for option in options_of(SamplingParams).values())


class Warm(SamplingParams, kw_only=True, frozen=True):
    warmth: Annotated[float, Meta(ge=0, le=2, description="how kind the words are")] = 0.5


def test_one_field_is_a_parameter_of_engine_command_line_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its range and its meaning stand with it alone."""
    with pytest.raises(RequestError, match=r"^warmth=3 is out of range; it must be a number from 0 to 2$"):
        Warm(warmth=3).validate(10)
    with pytest.raises(RequestError, match=r"^warmth=nan is out of range"):
        Warm(warmth=float("nan")).validate(10)
    Warm(warmth=2).validate(10)
    monkeypatch.setitem(TITLES, Warm, "sampling options")
    shown = Parser("x", Command("x", "", {Warm: None}, run=lambda args, settings: 0)).format_help()
    assert re.search(r"--warmth X +how kind the words are \[0.5\]", shown)
    body: Any = body_of(Warm)
    assert decode(b'{"warmth": 1.5}', body).warmth == 1.5
    with pytest.raises(ApiError, match="warmth=3"):
        decode(b'{"warmth": 3}', body)
    assert '"maximum":2' in msgspec.json.encode(msgspec.json.schema(body)).decode()


@pytest.mark.parametrize("service", ["SKIPSTONE", "SKIPSTONE_SPEC", "SKIPSTONE_API_KEY", "SKIPSTONE_2"])
def test_variables_of_a_service_of_that_name_are_passed_over(service: str) -> None:
    """Kubernetes tells every container of every service of its namespace."""
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.7:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.7",
        f"{service}_PORT_53_UDP": "udp://10.0.0.7:53",
    }
    found = settings("demo", verb="serve", environ=environ)
    assert (found.values["port"], found.sources["port"]) == (8000, "default")
    assert set(found.sources.values()) == {"default", "command line"}
    found = settings("demo", verb="serve", environ=environ | {"SKIPSTONE_PORT": "81"})
    assert (found.values["port"], found.sources["port"]) == (81, "SKIPSTONE_PORT")


@pytest.mark.parametrize("given", [{"SKIPSTONE_PORT": "http://a"}, {"SKIPSTONE_SERVICE_HOSTS": "a"}])
def test_what_no_service_sets_is_still_an_error(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given.values())) + "|" + next(iter(given))):
        settings("demo", verb="serve", environ=given)


def test_flag_beats_variable_beats_file_beats_checkpoint_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("top-k: 1\nmax_num_seqs: 1\nseed: 1\n")
    environ = {"SKIPSTONE_TOP_K": "2", "SKIPSTONE_SEED": "2"}
    found = settings("demo", "--config", str(file), "--top-k", "3", environ=environ)
    found = found.with_checkpoint({"top_k": 9, "top_p": 0.9, "temperature": 0.5})
    chosen = {name: (found.values[name], found.sources[name]) for name in ("model", "top_k", "seed", "max_num_seqs")}
    assert chosen == {
        "model": ("demo", "command line"),
        "top_k": (3, "--top-k"),
        "seed": (2, "SKIPSTONE_SEED"),
        "max_num_seqs": (1, str(file)),
    }
    assert (found.values["top_p"], found.sources["top_p"]) == (0.9, "generation_config.json")
    assert (found.values["min_p"], found.sources["min_p"]) == (0.0, "default")
    assert (found.values["max_tokens"], found.sources["max_tokens"]) == (256, "default of this command")


def test_repeated_flags_add_up() -> None:
    found = settings(
        *("--stop", "a,b", "--stop", "c", "--stop-token-ids", "1,2", "--stop-token-ids", "3"),
        *("--logit-bias", "5=-1.5", "--logit-bias", "6=2,7=-inf", "--top-k", "-1", "--max-tokens", "none"),
    ).sampling_params()
    assert found.stop == ["a,b", "c"]
    assert found.stop_token_ids == [1, 2, 3]
    assert found.logit_bias == {5: -1.5, 6: 2.0, 7: -math.inf}
    assert (found.top_k, found.max_tokens) == (-1, None)


def test_what_print_config_prints_is_a_config_file(tmp_path: Path) -> None:
    first = settings("demo", "--top-k", "5", "--no-exact", "--stop", 'a"b: #', "--logit-bias", "5=1")
    file = tmp_path / "options.yaml"
    file.write_text(first.describe())
    assert settings("--config", str(file)).values == first.values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq: 3", r"no option 'max_num_seq' \(from .*yaml\); did you mean max_num_seqs\?"),
        ("max_num_seqs: zero", r"max_num_seqs=zero \(from .*yaml\) must be a whole number of at least 1"),
        ("max_num_seqs: [1]", r"max_num_seqs=\[1\] \(from .*yaml\) must be a whole number"),
        ("- a\n- b", "must map option names to values"),
        ("a: b: c", "is not valid YAML"),
        ("top-k: 1\ntop_k: 2", "sets top_k twice"),
        ("top_k: 1\nseed: 3\ntop_k: 1", "sets top_k twice"),
        ("logit_bias:\n  5: 1\n  5: 2", "sets 5 twice"),
    ],
)
def test_bad_config_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        settings("--config", str(file))


def test_an_empty_config_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert settings("--config", str(tmp_path / "empty.yaml")).values == settings().values


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SKIPSTONE_MAX_NUM_SEQ": "3"}, "no environment variable 'SKIPSTONE_MAX_NUM_SEQ'; did you mean SKIPSTONE_"),
        ({"SKIPSTONE_EXACT": "perhaps"}, r"exact=perhaps \(from SKIPSTONE_EXACT\) must be true or false"),
    ],
)
def test_bad_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(environ=environ)


def test_a_variable_for_another_verb_is_no_error() -> None:
    assert "temperature" not in settings(verb="inspect", environ={"SKIPSTONE_TEMPERATURE": "1"}).values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seq", "4"], "no option '--max-num-seq'; did you mean --max-num-seqs?"),
        (["--zzzz"], "no option '--zzzz'; see skipstone generate --help"),
        (["demo", "words"], "unexpected argument 'words'; usage: skipstone generate MODEL"),
        (["demo", "--model", "other"], "two models: demo and --model other; keep one"),
        (["--logit-bias", "five"], "logit_bias=five (from --logit-bias) must be a map"),
        (["--logit-bias", "5=1,6=2,5=3"], "logit_bias=5=1,6=2,5=3 (from --logit-bias) must be a map"),
        (["--logit-bias", "5=nan", "--logit-bias", "5=3"], "no id twice"),
        (["--top-k"], "argument --top-k: expected one argument; see skipstone generate --help"),
        (
            ["--num-threads", "2000"],
            "num_threads=2000 (from --num-threads) must be a whole number from 1 to 1024 or none",
        ),
        (["--config", "/nonexistent.yaml"], "--config /nonexistent.yaml cannot be read: No such file"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("arguments", ["demo -", "- demo", "demo -p x -", "--model demo -"])
def test_a_dash_stands_for_standard_input(arguments: str) -> None:
    command = load_command("generate")
    args = Parser("generate", command).parse(arguments.split())
    assert args.stdin
    assert resolve(command, args, {}).values["model"] == "demo"


def test_a_checkpoint_default_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"temperature=hot \(from generation_config.json\) must be a number"):
        settings().with_checkpoint({"temperature": "hot"})


def test_a_port_that_is_none_names_both_limits() -> None:
    with pytest.raises(ConfigError, match=r"port=99999 \(from --port\) must be a whole number from 0 to 65535"):
        settings("--port", "99999", verb="serve")
