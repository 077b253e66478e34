"""The fake vLLM writes its own heads as the recorded ones of a vLLM 0.32 stood on the wire."""

from __future__ import annotations

import re

from support.fake_vllm import LAST_CHUNK, STREAM_HEAD, chunk, recording, unchunked, whole_reply


def field_names(head: bytes) -> set[bytes]:
    return {line.partition(b":")[0] for line in head.strip().split(b"\r\n")[1:]}


NOT_PLAYED = {b"date", b"vary"}
"""Fields of a real head that say nothing of how to read the body; the fake may leave them out."""


def test_a_whole_reply_is_the_recorded_one() -> None:
    real = recording("chat.asked")

    fake = whole_reply(real.body)

    head, _, body = fake.partition(b"\r\n\r\n")
    assert body == real.body
    assert field_names(head) - NOT_PLAYED == field_names(real.head) - NOT_PLAYED
    length = re.compile(rb"content-length: \d+")
    assert length.findall(head) == length.findall(real.head)


def test_a_stream_is_framed_as_the_recorded_one() -> None:
    real = recording("chat_stream.asked")

    fake = b"".join(chunk(unchunked(piece)) for piece in real.chunks[:-1]) + LAST_CHUNK

    assert fake == real.framed
    assert field_names(STREAM_HEAD) == field_names(real.head) - NOT_PLAYED
