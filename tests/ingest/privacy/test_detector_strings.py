"""Strings that were written before the patterns: what of them is found, and what is a false alarm.

Secrets are put together here from a beginning and drawn characters, so that no file holds one.
"""

from __future__ import annotations

import random
import string

import pytest

from ingest.privacy.detectors import Detectors
from sidecar.settings.store import EMAIL, IBAN, SECRET

WORDS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
MOST_MISSED, MOST_FALSE = 0.10, 0.02

TOKENS = """
npm_ 36|gsk_ 52|xai- 80|r8_ 37|pplx- 48|tvly-dev- 32|nvapi- 64|fw_ 24|csk- 48|pcsk_ 60
dckr_pat_ 27|dckr_oat_ 32|shpat_ 32h|shpss_ 32h|lin_api_ 40|ntn_ 46|figd_ 40|PMAK- 24h
dp.st.prd. 43|hvs. 90|glsa_ 32|glc_ 60|sntrys_ 80|sntryu_ 64h|NRAK- 27|pscale_tkn_ 43
pscale_pw_ 43|ATATT3xFfGF0 180|ATCTT3xFfGF0 180|ATBB 32|GOCSPX- 28|ya29. 120|xapp-1- 60|whsec_ 32
rk_live_ 24|rubygems_ 48h|dop_v1_ 64h|doo_v1_ 64h|dapi 32h|sbp_ 40h|sb_secret_ 31|tskey-auth- 40
tskey-api- 40|sk-lf- 36|lsv2_pt_ 43h|lsv2_sk_ 43h|CFPAT- 43|sgp_ 40h|nfp_ 40|cio 32|fm2_ 100
HRKU- 60|ops_eyJ 200|sk- 48|sk-ant-api03- 90|sk-proj- 120|sk-or-v1- 64h|hf_ 34|AIza 35|ghp_ 36
gho_ 36|ghs_ 36|github_pat_ 82|glpat- 20|AKIA 16U|ASIA 16U|xoxb- 50|sk_live_ 24|SG. 22.43|jina_ 60
sk_ 48h|AGE-SECRET-KEY-1 58U|key- 32h|apify_api_ 36|glimt- 25|hvb. 120|1//0 60|vercel_blob_rw_ 40
vcp_ 56|LTAI5t 18|phx_ 43|EZAK 54|sl.B 130|sq0atp- 22|EAAA 60|pa- 43|secret_ 43|ABSK 80
https://discord.com/api/webhooks/123456789012345678/ 68
""".replace("\n", "|")
AFTER = (
    "aws_secret_access_key = {40}",
    "AWS_SECRET_ACCESS_KEY={40}",
    'export AWS_SECRET_ACCESS_KEY="{40}"',
    '"SecretAccessKey": "{40}"',
    "aws_secret_access_key: {40}",
    "secretAccessKey: '{40}'",
    "AWS_SESSION_TOKEN={200}",
    "x-api-key: {40}",
    "x-api-key: abcdefghijklmnopqrs{3h}1",
    "<SecretAccessKey>{40}</SecretAccessKey>",
    "aws configure set aws_secret_access_key {40}",
    "AWS_SECRET_KEY={40}",
    "MISTRAL_API_KEY={32}",
    "X-Api-Key: {32}",
    "-H 'x-api-key: {36}'",
    '"x-api-key": "{48}"',
    "x-goog-api-key: {39}",
    "api-key: {32}",
    "X-Auth-Token: {40}",
    "xi-api-key: {32}",
    "Ocp-Apim-Subscription-Key: {32}",
    "DD-API-KEY: {32}",
    "X-API-Key={40}",
    "'X-API-KEY': '{24}'",
    "x-api-key:{64}",
    "X-Subscription-Token: {31}",
    "x-rapidapi-key: {50}",
    "Authorization: Bearer {40}",
    "postgres://app:{20}@db/x",
)
IBANS = (
    "de89370400440532013000",
    "de89 3704 0044 0532 0130 00",
    "gb29nwbk60161331926819",
    "fr1420041010050500013m02606",
    "nl91abna0417164300",
    "es9121000418450200051332",
    "it60x0542811101000000123456",
    "ch9300762011623852957",
    "at611904300234573201",
    "be68539007547034",
    "pl61109010140000071219812874",
    "DE89370400440532013000",
)
MAILS = (
    "jörg@müller.de",
    "info@bücher.example",
    "иван@пример.рф",
    "user@пример.рф",
    "用户@例子.中国",
    "user@例え.jp",
    "josé.garcía@example.es",
    "χρήστης@παράδειγμα.ελ",
    "anna@xn--bcher-kva.example",
    "a.b+c@exämple.com",
    "ana@example.com",
    "søren@ærø.dk",
)
CLEAN = (
    "git@github.com:owner/repo.git",
    "git clone git@gitlab.com:group/sub/repo",
    "ssh://git@host.example/owner/repo",
    "remote: git@bitbucket.org:team/repo.git",
    "git@ssh.dev.azure.com:v3/org/p/r",
    "npm_config_registry",
    "assets/icon@2x.png",
    "logo@3x.PNG",
    "pittsburgh-pa-homes-for-sale-with-a-pool-and-garage-near-downtown",
    "session_token /home/user/projects/something/else/here/foo/bar",
    "x-api-key: YOUR_API_KEY_GOES_HERE",
    "npm_lifecycle_event",
    "npm_package_name=left-pad",
    "sk-learn is not scikit-learn",
    "task-management-system-with-many-words-in-its-name",
    "x-api-key: $API_KEY",
    "x-api-key: ${ANTHROPIC_API_KEY}",
    "set the x-api-key header",
    "'x-api-key': os.environ['KEY']",
    "x-api-key: <your key>",
    "api-key: string, required",
    "api_key = settings.anthropic_api_key",
    "X-Auth-Token is required",
    "x-api-key: YOUR_API_KEY_HERE",
    "aws_secret_access_key = <secret>",
    "AWS_SECRET_ACCESS_KEY=$SECRET",
    "SecretAccessKey: !Ref Key",
    "fw_version = 1.2.3",
    "dapi is a data api",
    "hvs.example",
    "pa-ss-word",
    "key-value-store",
    "key-derivation-function-of-long-name",
    "r8_register",
    "cio is an officer",
    "lin_api_version",
    "ntn_count",
    "glc_context",
    "whsec_",
    "rk_live_",
    "sha256:" + "ab12" * 16,
    "commit de12ab34cd56ef7890ab12cd34ef5678ab90cd12",
    "req_011CSHoEeqs5C35K2UUqR7Fy",
    "call_abc123def456ghi789jkl012",
    "toolu_01A09q90qw90lq917835lq9",
    "msg_01XFDUDYJgAACzvnptvVoYEL",
    "chatcmpl-123456789abcdef",
    "550e8400-e29b-41d4-a716-446655440000",
    "ab12cdef3456789012",
    "de12 is a road, and 34 a house",
    "version v1.2.3@sha",
    "@types/node@20.1.0",
    "react@18.2.0",
    "user@localhost",
    "a@b",
    "name@",
    "@user",
    "x @ y.com",
    "pip install a@1.0",
    "int8@fp16",
    "docker pull image@sha256:" + "0f" * 32,
    "sk_buff",
    "sk_prefix",
    "key-1",
    "Bearer token",
    "Authorization: Bearer $TOKEN",
    "tskey-",
    "figd_",
    "sb_publishable_key",
    "hf_hub_download",
    "hf_model_id",
    "AIzawa",
    "github_pattern",
    "glpat-short",
    "xai-org/grok",
    "xoxo",
    "sgp_",
    "gsk_",
    "ops_team",
    "nvapi-client",
    "csk-1",
    "pplx-api",
    "PMAK-",
    "dp.start",
    "glsa_x",
    "SG.1",
    "apify_api_client",
    "jina_embeddings",
    "whsec_test",
    "sbp_x",
    "the order 12345678901234567890",
    "base64 of nothing: AAAA",
    "s3://bucket/key-of-the-object/2024/01/01",
    "https://example.com/a:b@c",
    "see https://example.com/@user/post",
    "mailto:",
    "e-mail",
    "lsv2_pt_",
    "ATBB",
    "cio_metrics_collector",
)


def drawn(chance: random.Random, form: str) -> str:
    """form: a number of characters, then h for hexadecimal, U for capitals and digits."""
    if "." in form:
        return ".".join(drawn(chance, part) for part in form.split("."))
    letters = {"h": HEX, "U": string.ascii_uppercase + "234567"}.get(form[-1], WORDS)
    return "".join(chance.choices(letters, k=int(form.rstrip("hU"))))


def values() -> list[tuple[str, str]]:
    """Return texts that hold a value, and its kind."""
    chance = random.Random(17)
    found = []
    for token in filter(None, (one.strip() for one in TOKENS.split("|"))):
        start, form = token.split(" ")
        found.append((SECRET, f"the key is {start}{drawn(chance, form)}, keep it"))
    for text in AFTER:
        before, _, rest = text.partition("{")
        form, _, after = rest.partition("}")
        found.append((SECRET, before + drawn(chance, form) + after))
    found += [(IBAN, f"pay to {one} today") for one in IBANS]
    return found + [(EMAIL, f"write to {one} now") for one in MAILS]


def test_of_written_strings_few_are_missed_and_fewer_are_false_alarms() -> None:
    detectors = Detectors((SECRET, IBAN, EMAIL))

    missed = [text for kind, text in values() if kind not in detectors.kinds_in(text.encode())]
    alarms = [text for text in CLEAN if detectors.kinds_in(text.encode())]

    assert len(values()) + len(CLEAN) >= 200
    assert len(missed) <= MOST_MISSED * len(values()), missed
    assert len(alarms) <= MOST_FALSE * len(CLEAN), alarms


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("send to de89 3704 0044 0532 0130 00 please pay it", "de89 3704 0044 0532 0130 00"),
        ("an: jörg@müller.de.", "jörg@müller.de"),
    ],
)
def test_a_value_is_found_whole(text: str, value: str) -> None:
    (found,) = Detectors((IBAN, EMAIL)).find(text.encode())

    assert text.encode()[found.start : found.end].decode() == value
