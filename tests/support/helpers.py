"""Small real parts for tests: tokenizers and models that are made in milliseconds and learn in seconds."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from turnstile.swe.bug import Bug
from turnstile.swe.bugs import mutate
from turnstile.swe.packages.source import fetch
from turnstile.types import Task

TEMPLATES = Path(__file__).parents[1] / "agents" / "templates"
PIECES = r"\n| ?[^\s]+| "
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def guess_texts(low: int = 1, high: int = 15) -> list[str]:
    """Everything that is said in a guessing game played in lines."""
    told = [f"Find the number from {low} to {high}.", "Commands: guess NUMBER", f"guess from {low} to {high}"]
    return [*told, "higher", "lower", "right", *(f"guess {number}" for number in range(low, high + 1))]


def tiny_tokenizer(texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words (with the blank before them) and newlines; the words of `texts` and no others.

    Decoding an encoding gives the text back. Special tokens are <pad>, <eos> and <unk>.
    """
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    words = dict.fromkeys(["<pad>", "<eos>", "<unk>", "\n"])
    for text in guess_texts() if texts is None else texts:
        words.update(dict.fromkeys(piece for piece, _ in split.pre_tokenize_str(text)))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def byte_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes: 256 of them, <pad>, <|im_start|>, <|im_end|> (end of sequence), then `special`.

    Takes any text; its chat template is ChatML.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    wrapped.chat_template = CHATML
    return wrapped


def tiny_llama(
    vocab: int, *, hidden: int = 64, layers: int = 2, heads: int = 4, context: int = 256, seed: int = 0
) -> LlamaForCausalLM:
    """A Llama with random weights, the same for the same seed; about 0.1 M parameters as it stands."""
    import torch

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def family_tokenizer(smollm2: PreTrainedTokenizerBase, family: str) -> tuple[PreTrainedTokenizerBase, str]:
    """SmolLM2's tokenizer with another family's special tokens added, and a template in that family's style.

    The families' own tokenizers differ in everything but where their special tokens stand, which is what the
    layout of a conversation hangs on.
    """
    tokenizer = copy.deepcopy(smollm2)
    tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES[family])})
    return tokenizer, (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    "qwen2_5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "zephyr": ("</s>",),
    "llama2": ("<s>", "</s>"),
}  # fmt: skip

CLAMP = '''"""A package of one function."""


class Range:
    def clamp(self, value, low, high):
        """Keep value between low and high.

        Both ends belong to the range.
        """
        # below first
        if value < low:
            return low
        if value > high:
            return high
        return value
'''
CLAMP_TESTS = """from tinyrange import Range


def test_below():
    assert Range().clamp(-1, 0, 9) == 0


def test_above():
    assert Range().clamp(10, 0, 9) == 9


def test_inside():
    assert Range().clamp(5, 0, 9) == 5


def test_other():
    assert Range()
"""


class FolderSource:
    """A package of the index whose files are written out here, for `turnstile.swe.packages.source.fetch`."""

    kind, name, version, spec = "pypi", "tinyrange", "1.0", "pypi:tinyrange==1.0"

    def unpack(self, into: Path) -> None:
        for path, text in {
            "tinyrange/__init__.py": CLAMP,
            "tests/test_clamp.py": CLAMP_TESTS,
            "pyproject.toml": '[project]\nname = "tinyrange"\nversion = "1.0"\n',
            "LICENSE": "MIT License\n",
        }.items():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            (into / path).write_text(text, encoding="utf-8")


def bug_task(cache: Path) -> Task:
    """A task in the package `tinyrange`, put into `cache` ($TURNSTILE_CACHE must name it): `value < low` reads
    `value > low`."""
    package = fetch(FolderSource(), cache=cache)
    file = "tinyrange/__init__.py"
    text = (package.tree / file).read_text(encoding="utf-8")
    mutant = next(m for m in mutate.mutants(text) if (m.old, m.new) == ("<", ">"))
    patch = mutate.patch(text, mutant)
    bug = Bug(
        source=package.spec, package=package.name, version=package.version, licence=package.licence,
        requires=package.requires, digest=package.digest[:16], file=file, function=mutant.function.qualname,
        kind=mutant.kind, line=mutant.line, col=mutant.col, old=mutant.old, new=mutant.new, buggy=patch.buggy,
        fixed=patch.fixed, unique=patch.unique, shown=(mutant.function.start, mutant.function.end),
        hidden=mutant.function.hidden, f2p=("tests/test_clamp.py::test_below", "tests/test_clamp.py::test_inside"),
        p2p=("tests/test_clamp.py::test_above",), message="AssertionError: assert -1 == 0", difficulty=4,
    )  # fmt: skip
    return Task(id="tinyrange/clamp", env="swe", data=bug.data())
