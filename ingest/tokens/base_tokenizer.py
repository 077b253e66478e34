"""The base model's tokenizer: find it, load it, and check exchanges with it.

`serving.base_model_path` is a folder, or a Hugging Face Hub name whose files the learner or vLLM
has downloaded to this machine's cache. Nothing is downloaded here: ingest must not wait for the
Hub. Without a tokenizer nothing is checked, which is logged, counted with every exchange, and shown
by `sidecar status`. The `tokenizers` library is Rust: it needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from ingest.errors import NoTokenizerError
from ingest.tokens.check import Vocabulary, check_answer, check_exchange
from sidecar.records import Choice, Exchange

FILE = "tokenizer.json"
FLAG = "token_check"
"""Row of the `flag` table that shows `TokenCheck.state` to other processes."""
ON = "on"
OFF = "off"
SEARCH_S = 60.0
"""Interval of the search for a missing file: the learner downloads the base model at its first
run."""

log = structlog.get_logger()


class TokenCheck:
    """Checks exchanges once there is a tokenizer. For one thread."""

    def __init__(self, base_model_path: str) -> None:
        self._base_model_path = base_model_path
        self._vocabulary: Vocabulary | None = None
        self._search_at = 0.0
        self.state = ""
        """Either "on" or "off: " with what to do; empty before the first search."""

    def poll(self, now: float) -> bool:
        """Search for the tokenizer if there is none yet. Returns: True when `state` changed."""
        if self._vocabulary is not None or now < self._search_at:
            return False
        self._search_at = now + SEARCH_S
        before = self.state
        try:
            self._vocabulary = load_vocabulary(self._base_model_path)
            self.state = ON
        except NoTokenizerError as error:
            self.state = f"{OFF}: {error}"
        if self.state == before:
            return False
        if self._vocabulary is not None:
            log.info("token_check_on", base_model=self._base_model_path)
        else:
            log.warning("token_check_off", why=self.state)
        return True

    def __call__(self, exchange: Exchange) -> str:
        """Check an exchange. Returns: an outcome of `ingest.tokens.check`, or "off"."""
        return OFF if self._vocabulary is None else check_exchange(exchange, self._vocabulary)

    def answer(self, choice: Choice, request: Mapping[str, Any], prompt: Sequence[int]) -> str:
        """Check one answer with token ids. prompt: the prompt's ids. Returns: as `__call__`."""
        if self._vocabulary is None:
            return OFF
        return check_answer(choice, request, prompt, self._vocabulary)


def load_vocabulary(base_model_path: str) -> Vocabulary:
    """Load the tokenizer of the base model.

    Raises: NoTokenizerError, whose message says what to do.
    """
    from tokenizers import Tokenizer

    path = find_tokenizer(base_model_path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower class
        raise NoTokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return Vocabulary(
        decoder=tokenizer,
        added=frozenset(added),
        special=frozenset(number for number, token in added.items() if token.special),
    )


def find_tokenizer(base_model_path: str) -> Path:
    """Return the path of the tokenizer's file. Raises: NoTokenizerError."""
    if not base_model_path:
        raise NoTokenizerError(
            "serving.base_model_path is empty; name the weights that vLLM serves"
        )
    folder = Path(base_model_path)
    if folder.is_dir():
        if (folder / FILE).is_file():
            return folder / FILE
        raise NoTokenizerError(
            f"{folder} has no {FILE}; put the one that vLLM uses beside the weights"
        )
    return _in_hub_cache(base_model_path)


def _in_hub_cache(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, FILE)
    except HFValidationError as error:
        raise NoTokenizerError(
            f"serving.base_model_path {name} is neither a folder nor a Hugging Face Hub name"
        ) from error
    if not isinstance(found, str):
        raise NoTokenizerError(
            f"{FILE} of {name} is not in this machine's hub cache; run `hf download {name} {FILE}`"
        )
    return Path(found)
