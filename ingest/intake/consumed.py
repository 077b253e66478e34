"""What became of the records of a batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """Outcome of a batch; all numbers but `decided` add up to the records read."""

    stored: int = 0
    repeated: int = 0
    poison: int = 0
    feedback: int = 0
    """Feedback and outcomes, whatever became of them (`ingest.feedback.placing`)."""
    dropped: int = 0
    """Records that the privacy policy of their project dropped."""
    forgotten: int = 0
    """Records of a user, a session or an exchange that `sidecar forget` removed."""
    decided: int = 0
    """Exchanges that selection decided, of those stored."""

    @property
    def read(self) -> int:
        found = self.stored + self.repeated + self.poison
        return found + self.feedback + self.dropped + self.forgotten

    def __add__(self, other: Consumed) -> Consumed:
        return Consumed(
            stored=self.stored + other.stored,
            repeated=self.repeated + other.repeated,
            poison=self.poison + other.poison,
            feedback=self.feedback + other.feedback,
            dropped=self.dropped + other.dropped,
            forgotten=self.forgotten + other.forgotten,
            decided=self.decided + other.decided,
        )
