"""Tell refusals and clarifying questions by their words. Pure.

A refusal is told by English phrases at the beginning of a sentence, in the first sentences of a
short answer. A clarifying question is told by its form in every language (the answer is nothing
but questions), and by English phrases where a lead-in stands before it. Text in quotes, in code
and in Markdown's quotation is nobody's own, and does not count. In other languages refusals are not
seen. Precision and recall on labelled answers: docs/reward-watch.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import re2

HEAD = 2_000
"""Characters of an answer that are looked at; longer answers are neither."""
REFUSAL_LENGTH = 1_200
"""A longer answer has more to say than that it declines, in characters."""
OPENING = 3
"""Sentences of an answer among which a refusal begins."""
LEAD_IN = 240
"""Characters of an answer that may stand beside its questions."""
PLEA_LENGTH = 600
"""A longer answer that asks for something has an answer in it as well, in characters."""

_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_QUOTED_LINE = re.compile(r"^[ \t]*>.*$", re.MULTILINE)
_QUOTED = re.compile(r'"[^"\n]{0,400}"|«[^»\n]{0,400}»|„[^“\n]{0,400}“')
_MARKS = re.compile(r"^[\s*_#>\-•\d.)(]*", re.MULTILINE)
_END = re.compile(r"(?<=[.!?。！？؟])[\s\"')\]*_]+|(?<=[。！？])|\n+")
_STRAIGHT = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"'})

_CANNOT = (
    r"(?:can(?:no|')t|can not|could(?:n't| not)|won't|will not|am (?:unable|not able) to"
    r"|'m (?:unable|not able|not allowed|not permitted) to|am not (?:allowed|permitted) to"
    r"|won't be able to|will not be able to|am unwilling to|'m not going to|am not going to"
    r"|do(?:n't| not) feel comfortable|'m not comfortable|am not comfortable"
    r"|must (?:respectfully |politely )?(?:decline|refuse)|have to (?:decline|refuse)"
    r"|need to decline|(?:respectfully |politely )?decline|refuse to)"
)
_DEED = (
    r"(?:\s+(?:be able to|directly|really|actually|personally|in good conscience|just|simply|to))*"
    r"\s+(?:help|assist|aid|provide|providing|do|share|sharing|discuss|comply|fulfil|fulfill"
    r"|answer|create|creating|write|writing|generate|give|support|engage|continue|offer|complete"
    r"|participate|produce|advise|recommend any|recommend that|carry out|perform|process|handle"
    r"|respond|proceed|disclose|reveal|express|explain|show|make|tell you|translate"
    r"|summari[sz]e|talk|say"
    r"|issue|cancel|change|send|speak|go into|work on|take part|be part|accommodate|let you"
    r"|this|that|your|the request|to|with)\b"
)
_SORRY = (
    r"(?:(?:unfortunately|regrettably|sadly|sorry|apologies|no|thanks|thank you|hello|hi)[,.:;!]?"
    r"\s+(?:but\s+)?)?"
    r"(?:(?:i'm|i am|we're|we are)\s+(?:\w+\s+)?(?:sorry|afraid)(?:\s+that)?[,.:;]?\s+(?:but\s+)?"
    r"(?:about that[,.]?\s+(?:but\s+)?)?"
    r"|(?:i|we)\s+apologi[sz]e(?:\s+for[^,.]{0,60})?[,.:;]?\s+(?:but\s+)?"
    r"|my apologies[,.:;]?\s+(?:but\s+)?"
    r"|(?:i|we) (?:understand|appreciate|know)[^.!?]{0,120}?,?\s+but\s+"
    r"|as an? (?:ai|language|assistant|artificial)[^,.]{0,60}[,.]?\s+"
    r"|unfortunately[,]?\s+)*"
)
_REFUSALS = (
    (rf"^{_SORRY}(?:i|we)\s*{_CANNOT}(?:{_DEED}|\s*[.!]?\s*$)"),
    (
        rf"^{_SORRY}(?:i|we)\s*(?:must (?:respectfully |politely )?|have to |need to )?"
        r"(?:respectfully |politely )?(?:decline|refuse)\b"
    ),
    (rf"^{_SORRY}i(?: am|'m)?\s*(?:do(?:n't| not) feel|not) comfortable\s+(?:with|\w+ing)\b"),
    (
        rf"^{_SORRY}(?:that|this|it)(?:'s| is)(?: not|n't)? (?:something|a request|a topic|a task)?"
        r"\s*(?:that )?i(?:'m| am)?\s*(?:can(?:no|')t|can not|can|won't|not able to|unable to)"
        r"\s+(?:help|assist|do|provide|discuss|support|share|comply)"
    ),
    (
        rf"^{_SORRY}i(?:'d| would) (?:rather|prefer) not(?: to)?\s+"
        r"(?:help|assist|do|provide|discuss|answer|say|share|write|go)"
    ),
    (rf"^{_SORRY}i do(?:n't| not) (?:provide|offer|discuss|engage|share|give)\b"),
    (rf"^{_SORRY}(?:i'm|i am) (?:only able|here only|just here|designed only) to\b"),
    (
        rf"^{_SORRY}(?:your|this|that|the) request (?:violates|goes against|is against"
        r"|can(?:no|')t be|falls outside|is outside)\b"
    ),
    (r"^(?:this|that) (?:goes|is) against (?:my|our) (?:guidelines|policy|policies|rules)"),
)
_IDIOMS = re.compile(
    r"\b(?:can(?:no|')t|can not|could(?:n't| not))\s+"
    r"(?:wait|stress|help but|thank|recommend (?:it|this|that|them)|agree more|overstate"
    r"|emphasi[sz]e"
    r"|say (?:for sure|enough|no)|make any|imagine|believe|think of"
    r"|tell (?:the|which|whether|if|from)"
    r"|see|find|give you (?:an? )?exact)"
)

_OFFER = re.compile(
    r"^(?:(?:so|and|or|also|now)[, ]+)?(?:"
    r"(?:would|do) you (?:like|want)(?: me)? to (?:know|see|hear|learn|try|continue|go|proceed"
    r"|add|me)?"
    r"|would you like (?:me|help|more|another|an|a|some|any|further|details)"
    r"|do you (?:want|need) (?:me|help|more|another|any|further|anything)"
    r"|(?:is there|was there|do you have) (?:anything|something|any (?:other|more|further)|another)"
    r"|(?:shall|should|can|may|could|how (?:else )?(?:can|may)) i\b"
    r"|what else (?:can|may|could)"
    r"|any(?:thing)? (?:else|other|more|further|questions)"
    r"|(?:does|did|do) (?:that|this|it|these|those) (?:help|make|answer|work|look"
    r"|sound|clarif|clear)"
    r"|(?:is|was) (?:that|this|it) (?:what|ok|okay|clear|helpful|all|enough|right|correct)"
    r"|(?:how|what) (?:does|do|about) (?:that|this|it|you)\b"
    r"|(?:right|ok|okay|isn't it|don't you think|make sense|want me|need)\b)"
)
_PLEA = (
    r"^(?:(?:sure|certainly|of course|absolutely|happy to help|thanks|thank you|ok|okay|sorry|first"
    r"|before (?:i|we)[^,.?]{0,60}|to (?:help|do|get|give|answer|proceed|continue|make)[^,.?]{0,80}"
    r"|so (?:that )?i can[^,.?]{0,60})[,.!:;]?\s+(?:and\s+|but\s+)?)*"
    r"(?:"
    r"(?:could|can|would|will) you (?:please |kindly |first |also |just )?"
    r"(?:clarify|specify|provide"
    r"|share|tell|confirm|give|elaborate|explain what|explain which|let me know|send|say"
    r"|paste|be more"
    r"|describe|rephrase|double-check|upload|attach|point me)"
    r"|please (?:clarify|specify|provide|share|tell me|confirm|give me|elaborate"
    r"|let me know (?:which|what|where|when|how|whether|if|the|your)|send (?:me )?(?:the|your)"
    r"|describe|paste|upload|attach)"
    r"|i(?:'d| would)? (?:just )?need (?:to know|more|a (?:bit|little) more|some|a few|you to"
    r"|your|the"
    r"|additional|further)"
    r"|(?:which|what|who|whose|where|when|how (?:many|much|long|often|big|old|far))\b[^?]*\?"
    r"|(?:are|did|do|were|is|was|have|will) (?:you|it|this|that|these|the|your|there)\b[^?]*\?"
    r"|can you be more|what (?:exactly|do you mean|kind|type|specific)"
    r")"
)
_LEADS = re.compile(
    r"^(?:sure|certainly|of course|absolutely|great|happy|glad|i'd|i would|i'll|i will|i can"
    r"|i could"
    r"|i want|i need|i'm (?:happy|glad|not sure|sorry|unsure)|i am (?:happy|not sure|sorry|unsure)"
    r"|thanks|thank you|ok|okay|hello|hi|to (?:help|do|get|give|answer|proceed|continue|make|book"
    r"|find|check|process)|before|sorry|let me|let's|got it|no problem|it (?:looks|seems|sounds)"
    r"|there (?:are|is|seem)|your (?:question|request|message)|a few|just|one (?:more )?(?:thing"
    r"|question)|understood|it depends|that depends|i see|in order)\b"
)
_ENOUGH = rf"^{_SORRY}(?:i|we)\s*{_CANNOT}{_DEED}\s+enough"
"""`I cannot help enough`: no refusal."""
_PROGRAM_BYTES = 8 * 2**20
"""Memory of one compiled pattern; RE2's own default."""
_QUESTION = ("?", "？", "؟", "\u037e")


def is_refusal(text: str) -> bool:
    """Return True when an answer declines what it was asked, by English phrases."""
    if not text or len(text) > REFUSAL_LENGTH:
        return False
    for sentence in _sentences(_own_words(text))[:OPENING]:
        low = sentence.lower()
        if _IDIOMS.search(low) or _linear(_ENOUGH).match(low):
            continue
        if any(_linear(pattern).match(low) for pattern in _REFUSALS):
            return True
    return False


def is_clarifying(text: str) -> bool:
    """Return True when an answer asks the user for something instead of answering.

    An offer to do more (`Would you like ...?`) is no such question.
    """
    if not text or len(text) > HEAD:
        return False
    own = _own_words(text)
    sentences = _sentences(own)
    asked, offers, said = [], [], []
    for sentence in sentences:
        low = sentence.lower()
        if _OFFER.match(low):
            offers.append(low)
        elif low.endswith(_QUESTION) or _asks(low):
            asked.append(low)
        else:
            said.append(low)
    if not asked or not sentences or is_refusal(text):
        return False
    if not said and not offers and sentences[-1].endswith(_QUESTION):
        return True
    if sum(map(len, said)) > LEAD_IN or len(own) > PLEA_LENGTH:
        return False
    if not any(_linear(_PLEA).match(low) for low in asked):
        return False
    return all(_LEADS.match(low) for low in said)


@lru_cache(maxsize=32)
def _linear(pattern: str) -> Any:  # Any: a pattern of RE2
    """Compile for RE2, whose time is linear in the text: Python's own matcher tries each way to
    divide a text among repeated phrases, 2^20 of them for `as an ai ` written 20 times."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PROGRAM_BYTES
    return re2.compile(pattern, options)


def _asks(low: str) -> bool:
    return bool(_linear(_PLEA).match(low)) and not low.startswith(
        ("are ", "is ", "what ", "which ")
    )


def _own_words(text: str) -> str:
    straight = text[:HEAD].translate(_STRAIGHT)
    without = _QUOTED.sub(" x ", _QUOTED_LINE.sub("", _CODE.sub(" x ", straight)))
    return _MARKS.sub("", without.replace("**", "")).strip()


def _sentences(text: str) -> list[str]:
    return [part.strip(" \t*_\"'") for part in _END.split(text) if part.strip(" \t*_\"'.")]
