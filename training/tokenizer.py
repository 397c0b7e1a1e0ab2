"""Byte-level BPE with 6144 entries, its config and chat template; then the token files that training reads.

    python training/tokenizer.py [--data training/.data] [--out checkpoints/demo checkpoints/demo-dsa]

Token files are flat uint16 streams: <|bos|> document <|eos|> <|bos|> document <|eos|> ...
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 6144
SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|tool_call|>", "<|tool_result|>")
PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+(?!\S)|\s+"
MAX_LENGTH = 4096

CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{- '<|system|>' }}
{%- elif message['role'] == 'user' %}{{- '<|user|>' }}
{%- elif message['role'] == 'assistant' %}{{- '<|assistant|>' }}
{%- elif message['role'] == 'tool' %}{{- '<|tool_result|>' }}
{%- else %}{{- raise_exception('unknown role: ' + message['role'] + '; expected system, user, assistant or tool') }}
{%- endif %}
{{- message['content'] }}{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Deterministic for a given corpus: the trainer breaks ties by token order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=4)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))])
    return tokenizer


def render(document: dict) -> str:
    """Text of a document as the model sees it, between <|bos|> and <|eos|>; dialogues as the chat template writes them."""
    if "text" in document:
        return document["text"]
    return "".join(f"<|{role}|>{text}<|end|>" for role, text in document["turns"])


def read_documents(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def write_tokens(tokenizer: Tokenizer, documents: list[dict], path: Path) -> int:
    """Encode documents into one uint16 stream; returns the number of tokens."""
    bos, eos = tokenizer.token_to_id("<|bos|>"), tokenizer.token_to_id("<|eos|>")
    pieces = []
    for start in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch([render(d) for d in documents[start : start + 256]], add_special_tokens=False):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    stream = np.concatenate(pieces)
    stream.tofile(path)
    return len(stream)


def shuffled(documents: list[dict]) -> list[dict]:
    """Spread the dialogues over the stream by a fixed hash order; documents keep their neighbours of the same source."""
    files = [d for d in documents if "text" in d]
    chats = sorted((d for d in documents if "turns" in d), key=lambda d: hashlib.sha256(json.dumps(d["turns"]).encode()).digest())
    out, every = [], max(1, len(files) // max(1, len(chats)))
    per_file = -(-len(chats) // max(1, len(files)))
    for index, document in enumerate(files):
        out.append(document)
        if index % every == 0:
            out += [chats.pop() for _ in range(min(per_file, len(chats)))]
    return out + chats


def config() -> dict:
    """tokenizer_config.json."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_LENGTH, "bos_token": "<|bos|>", "eos_token": "<|eos|>",
            "pad_token": "<|pad|>", "mask_token": "<|mask|>", "additional_special_tokens": [t for t in SPECIAL[3:] if t != "<|mask|>"],
            "add_bos_token": True, "clean_up_tokenization_spaces": False}


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--out", type=Path, nargs="*", default=[here.parent / "checkpoints/demo", here.parent / "checkpoints/demo-dsa"])
    options = parser.parse_args()
    train, heldout = (read_documents(options.data / f"{name}.jsonl") for name in ("train", "heldout"))
    tokenizer = train_tokenizer([text for d in train for text in ([d["text"]] if "text" in d else [t for _, t in d["turns"]])])
    tokenizer.save(str(options.data / "tokenizer.json"))
    counts = {}
    for name, documents in (("train", train), ("heldout", heldout)):
        counts[name] = write_tokens(tokenizer, shuffled(documents), options.data / f"{name}.bin")
        size = (options.data / f"{name}.jsonl").stat().st_size
        print(f"{name}: {counts[name]} tokens, {size / counts[name]:.2f} bytes a token")
    for out in options.out:
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.data / "tokenizer.json", out / "tokenizer.json")
        (out / "tokenizer_config.json").write_text(json.dumps(config(), indent=1) + "\n")
        (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    hashes = {name: hashlib.sha256((options.data / name).read_bytes()).hexdigest() for name in ("tokenizer.json", "train.bin", "heldout.bin")}
    (here / "tokens.json").write_text(json.dumps({"tokens": counts, "sha256": hashes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
