"""The files of an adapter folder, the digest that names it, and its `probe.json`.

No torch: deploy reads it too.

Every file is opened relative to the opened folder, and symbolic links are refused for the folder
and its files, so only files in the folder itself are hashed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LINEAGE = "lineage.json"
CARD = "README.md"
OPTIMIZER = "optimizer.safetensors"
"""The optimiser's moments, beside versions of older releases. Nothing reads them."""
PROBE = "probe.json"
"""The learner's log-probabilities after fixed prompts. Versions of older releases have none."""
CURVES = "curves.png"
"""The figures of the run's steps, drawn by matplotlib, of the extra `learner`."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Members of the config with the ranks and alphas of single layers, where they differ from `r` and
`lora_alpha`. A lineage has them too."""
DIGESTED = (CONFIG, WEIGHTS)
"""Files under the digest: those that vLLM reads. The lineage and the card are excluded: they
describe one run (times, ids), and equal weights must get the same digest. The audit row keeps the
hashes of both."""
MAX_FILE_BYTES = 16 * 2**30
"""Largest file that is read: rank 128 on every linear layer of a 405B model is smaller. Without a
limit, hashing a sparse file of terabytes would take hours."""

Mark = tuple[int, int, int, int, int]
"""(device, inode, size, mtime, ctime) of a file, times in ns. Only root can set a ctime."""


@dataclass(frozen=True, slots=True)
class FolderState:
    """Digest and marks of a folder at the time it was read."""

    digest: str
    """SHA-256 (hex) of the canonical list of (path, size, SHA-256) of the digested files."""
    marks: tuple[Mark, ...]
    """Marks of the folder, then of each digested file, taken before the files were read."""


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a folder for `open_file`. Raises: OSError, also for a symbolic link."""
    descriptor = _open(folder, os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_file(folder: int, name: str) -> Iterator[io.BufferedReader]:
    """Open a plain file of a folder. Raises: OSError, also for a link, a pipe, a device, or more
    than MAX_FILE_BYTES."""
    # O_NONBLOCK: opening a pipe must not wait for its writer.
    with _plain(_open(name, os.O_NONBLOCK, folder), name) as file:
        if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"has more than {MAX_FILE_BYTES} bytes", name)
        yield file


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[io.BufferedReader]:
    """Open a plain file of any size, also behind a link. Raises: OSError, also for a pipe or a
    device, which could make its reader wait for ever."""
    with _plain(os.open(path, os.O_RDONLY | os.O_NONBLOCK), str(path)) as file:
        yield file


def read_plain(path: Path) -> str:
    """Return the text of a plain file. Raises: OSError, as `open_plain`; UnicodeDecodeError."""
    with open_plain(path) as file:
        return file.read().decode("utf-8")


def read_state(folder: Path) -> FolderState:
    """Hash the digested files. Raises: OSError when one is missing or cannot be read."""
    manifest = []
    with open_folder(folder) as descriptor:
        marks = [_mark(descriptor)]
        for name in DIGESTED:
            with open_file(descriptor, name) as file:
                mark = _mark(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            marks.append(mark)
            manifest.append({"path": name, "size": mark[2], "sha256": digest})
    return FolderState(manifest_digest(manifest), tuple(marks))


def manifest_digest(manifest: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of a folder from `path`, `size` in bytes and `sha256` (hex) of its files,
    in the order of DIGESTED."""
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """Return the digest that names a folder. Raises: OSError, as `read_state`."""
    return read_state(folder).digest


def folder_marks(folder: Path) -> tuple[Mark, ...]:
    """Return the present marks, to compare with `FolderState.marks`. Raises: OSError."""
    with open_folder(folder) as descriptor:
        marks = [_mark(descriptor)]
        for name in DIGESTED:
            with open_file(descriptor, name) as file:
                marks.append(_mark(file.fileno()))
    return tuple(marks)


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes. Raises: OSError, as `open_plain`."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path | str, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    except ValueError as error:  # a NUL byte, or a lone surrogate
        raise OSError(errno.EINVAL, "is not a valid file name", ascii(str(path))) from error
    except OSError as error:
        if _is_link(path, folder):
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from error
        raise


@contextlib.contextmanager
def _plain(descriptor: int, name: str) -> Iterator[io.BufferedReader]:
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a plain file", name)
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _is_link(path: Path | str, folder: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _mark(descriptor: int) -> Mark:
    found = os.fstat(descriptor)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


# `probe.json`: the learner's next-token log-probabilities after fixed prompts. Pure; no torch.

FORMAT = 1
MAX_BYTES = 256 * 2**10
"""Largest file that is read; the learner writes about 10 kB."""
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 512
MAX_LIKELIEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFile:
    """What the learner knows of an adapter."""

    prompts: tuple[tuple[int, ...], ...]
    """[prompts] token ids."""
    likeliest: tuple[Mapping[int, float], ...]
    """[prompts] likeliest next tokens: token id -> log-probability in nats, at temperature 1."""
    tolerance: float
    """Largest mean difference that is taken for rounding, nats a token: `learner.max_drift` of the
    run, which bounds the same difference over the answers that it learned from."""


def render_probe(probe: ProbeFile) -> str:
    """Render the text of `probe.json`."""
    answers = [
        {
            "prompt_token_ids": list(prompt),
            "likeliest": [[token, round(nats, 6)] for token, nats in likeliest.items()],
        }
        for prompt, likeliest in zip(probe.prompts, probe.likeliest, strict=True)
    ]
    found = {"format": FORMAT, "tolerance": probe.tolerance, "answers": answers}
    return json.dumps(found) + "\n"


def read_probe(content: bytes) -> ProbeFile:
    """Read a `probe.json`. Raises: ValueError when it is not as `render_probe` writes it."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    try:
        found = json.loads(content)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {FORMAT}")
        answers, tolerance = found["answers"], float(found["tolerance"])
        prompts = tuple(_prompt(one["prompt_token_ids"]) for one in answers)
        likeliest = tuple(_likeliest(one["likeliest"]) for one in answers)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error!r}") from error
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"has {len(prompts)} prompts, not 1 to {MAX_PROMPTS}")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"its tolerance is {tolerance}")
    return ProbeFile(prompts=prompts, likeliest=likeliest, tolerance=tolerance)


def _prompt(found: Any) -> tuple[int, ...]:  # Any: JSON
    ids = tuple(found)
    if not 0 < len(ids) <= MAX_PROMPT_TOKENS or any(type(one) is not int or one < 0 for one in ids):
        raise ValueError(f"a prompt is not 1 to {MAX_PROMPT_TOKENS} token ids")
    return ids


def _likeliest(found: Any) -> dict[int, float]:  # Any: JSON
    pairs = dict(found)
    sound = all(
        type(token) is int and type(nats) in (int, float) and math.isfinite(nats)
        for token, nats in pairs.items()
    )
    if not sound or not 0 < len(pairs) <= MAX_LIKELIEST:
        raise ValueError(f"the likeliest tokens are not 1 to {MAX_LIKELIEST} ids with nats")
    return pairs
