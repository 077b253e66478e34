"""Candidates with secrets of their own, under the privacy policy of their group's project."""

from __future__ import annotations

import pytest

from ingest.privacy import screen, texts
from ingest.privacy.screen import Screen
from ingest.sampling.worker import SamplingWorker
from ingest.vllm.sampler import Sampler
from sidecar.settings import Groups, Privacy
from support.clock import Clock
from support.ingest_kit import Kit

KEY = "sk-ant-" + "zebra0marker0" * 4
MAIL = "zebra.marker@example.com"
DROP = Privacy.model_validate({"projects": {"bank": {"flagged": "drop"}}})


def worker(kit: Kit, sampler: Sampler, privacy: Privacy | None) -> SamplingWorker:
    return SamplingWorker(
        kit.database,
        sampler,
        kit.FakeRoom(),
        Groups(size=4),
        model="smollm",
        now=Clock(1_795_262_400.0),
        screen=None if privacy is None else Screen(privacy),
    )


def contents(kit: Kit, group_id: str) -> list[bytes]:
    return [answer.message for answer in kit.group(group_id).answers]


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (None, KEY),
        (Privacy(), KEY),
        (DROP, KEY),
        (Privacy(before_storage=True), MAIL),
        (Privacy(), "long " * 400),
    ],
    ids=["no_settings", "keep_out", "drop", "before_storage", "too_large"],
)
async def test_a_private_candidate_is_left_out_and_its_group_goes_on(
    kit: Kit, privacy: Privacy | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "SEARCHED_BYTES", 1_000)
    (group_id,) = kit.choose(kit.exchange("e1", project="bank"))
    sampler = kit.FakeSampler("a", f"it is {said}", "c")

    assert await worker(kit, sampler, privacy).step() == 1

    assert contents(kit, group_id) == [kit.message(text) for text in ("served", "a", "c")]
    assert kit.row(group_id).status == "sampled"
    assert kit.counts("candidate") == {"kept": 2, "private": 1}
    assert kit.counts("sampling_tokens") == {"2026-11-21": 15}  # it is paid for all the same


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (Privacy(flagged="encrypt"), KEY),
        (Privacy(), MAIL),
        (Privacy.model_validate({"projects": {"bank": {"flag": []}}}), KEY),
    ],
    ids=["encrypt", "no_flagging_kind", "flags_nothing"],
)
async def test_a_candidate_that_the_policy_admits_is_kept(
    kit: Kit, privacy: Privacy, said: str
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1", project="bank"))

    await worker(kit, kit.FakeSampler(said, "b", "c"), privacy).step()

    assert contents(kit, group_id)[1] == kit.message(said)
    assert kit.counts("candidate") == {"kept": 3}


async def test_a_group_with_private_candidates_only_ends_as_private(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))

    assert await worker(kit, kit.FakeSampler(KEY), Privacy()).step() == 0

    row = kit.row(group_id)
    assert (row.status, row.reason) == ("set_aside", "private")
    assert contents(kit, group_id) == [kit.message("served")]


async def test_a_search_that_fails_costs_a_candidate(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = texts.kinds_in

    def kinds_in(bodies: list[bytes], *arguments: object, **named: object) -> list[str]:
        if b"break it" in bodies[0]:
            raise RuntimeError(bodies)
        return real(bodies, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("ingest.privacy.screen.kinds_in", kinds_in)
    (group_id,) = kit.choose(kit.exchange("e1"))

    await worker(kit, kit.FakeSampler("a", "break it", "c"), Privacy()).step()

    assert contents(kit, group_id) == [kit.message(text) for text in ("served", "a", "c")]
    assert kit.counts("candidate") == {"kept": 2, "private": 1}
