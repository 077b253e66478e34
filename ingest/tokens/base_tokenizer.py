"""The base model's tokenizer: find it, read it, and have exchanges checked with it.

`serving.base_model_path` is a folder, or a name of the Hugging Face hub whose files the learner or
vLLM has brought to this machine's cache. Nothing is fetched here: ingest must not wait for a hub.
Without a tokenizer nothing is checked, which is said in the log, counted with every exchange, and
shown by `sidecar status`. The `tokenizers` library is Rust: it needs neither torch nor
transformers.
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
"""Row of the `flag` table by which the other processes learn of `TokenCheck.state`."""
ON = "on"
OFF = "off"
LOOK_AGAIN_S = 60.0
"""A file that is not there may come: the learner fetches the base model at its first run."""

log = structlog.get_logger()


class TokenCheck:
    """Checks exchanges as soon as there is a tokenizer. Used by one thread."""

    def __init__(self, base_model_path: str) -> None:
        self._base_model_path = base_model_path
        self._vocabulary: Vocabulary | None = None
        self._look_at = 0.0
        self.state = ""
        """"on", or "off: " and what to do about it; empty before the first look."""

    def look(self, now: float) -> bool:
        """Look for the tokenizer if there is none yet. Returns: whether `state` changed."""
        if self._vocabulary is not None or now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
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
        """A outcome of `ingest.tokens.check`, or "off"."""
        return OFF if self._vocabulary is None else check_exchange(exchange, self._vocabulary)

    def answer(self, choice: Choice, request: Mapping[str, Any], prompt: Sequence[int]) -> str:
        """The same of one answer with ids to a request, given its prompt's ids."""
        if self._vocabulary is None:
            return OFF
        return check_answer(choice, request, prompt, self._vocabulary)


def load_vocabulary(base_model_path: str) -> Vocabulary:
    """Read the tokenizer of the base model.

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
    """The tokenizer's file. Raises: NoTokenizerError."""
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
            f"serving.base_model_path {name} is neither a folder nor a name of the hub"
        ) from error
    if not isinstance(found, str):
        raise NoTokenizerError(
            f"{FILE} of {name} is not in this machine's hub cache; `hf download {name} {FILE}` "
            "brings it there"
        )
    return Path(found)
