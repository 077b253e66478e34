"""The cache of decoded exchanges: bounded in bytes, the least recently used first."""

from __future__ import annotations

from sidecar.store.contents import MAX_OPENING_USES, MAX_OPENINGS, Content, ContentCache


def content(size: int) -> Content:
    return Content(b"r" * (size - 400), b"", b"", b"")


def test_the_least_recently_used_goes_first() -> None:
    cache = ContentCache(max_bytes=3_000)
    for name in "abc":
        cache.put(name, content(1_000))
    assert cache.get("a") is not None

    cache.put("d", content(1_000))

    assert [name for name in "abcd" if cache.get(name)] == ["a", "c", "d"]


def test_one_that_is_put_again_counts_once() -> None:
    cache = ContentCache(max_bytes=2_000)
    for _ in range(5):
        cache.put("a", content(1_000))
    cache.put("b", content(1_000))

    assert cache.get("a") is not None
    cache.drop("a")
    cache.drop("a")
    assert cache.get("a") is None
    cache.put("c", content(1_000))
    assert [name for name in "bc" if cache.get(name)] == ["b", "c"]


def test_what_is_no_base_or_too_large_is_not_kept() -> None:
    cache = ContentCache(max_bytes=2_000)
    cache.put("b", content(1_000))

    cache.put("a", Content(b"", b"", None, None))
    cache.put("c", content(2_001))

    assert [name for name in "abc" if cache.get(name)] == ["b"]


def test_an_opening_is_used_a_limited_number_of_times() -> None:
    cache = ContentCache()
    cache.set_opening(b"m", "a")

    found = [cache.opening(b"m") for _ in range(MAX_OPENING_USES + 2)]

    assert found == ["a"] * MAX_OPENING_USES + [None, None]


def test_the_oldest_opening_goes_when_there_are_many() -> None:
    cache = ContentCache()
    for number in range(MAX_OPENINGS + 1):
        cache.set_opening(str(number).encode(), f"e{number}")

    assert cache.opening(b"0") is None
    assert cache.opening(b"1") == "e1"
