"""What looks like a credential never reaches a status; what does not stays as it is."""

from __future__ import annotations

import time

import pytest

from ddpjob_operator.masking import mask

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("password=hunter2 user=me", "password=*** user=me"),
        ("password: 'a b c', user: 'me'", "password: '***', user: 'me'"),
        ('{"passwd": "x", "y": 1}', '{"passwd": "***", "y": 1}'),
        ("PGPASSWORD=12345", "PGPASSWORD=***"),
        ("HF_TOKEN=abcdefgh12345678", "HF_TOKEN=***"),
        ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "WANDB_API_KEY=***"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AWS_SECRET_ACCESS_KEY=***"),
        ("aws_access_key_id = AKIAIOSFODNN7EXAMPLE", "aws_access_key_id = ***"),
        ("found AKIAIOSFODNN7EXAMPLE in the log", "found *** in the log"),
        ("train.py --token abcdef12345678 --lr 0.1", "train.py --token *** --lr 0.1"),
        ("login with hf_abcdefghijklmnopqrstuvwxyz012345", "login with ***"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "***"),
        ("sk-proj-abcdefghijklmnopqrstuv", "***"),
        (f"sent {JWT} to it", "sent *** to it"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic dXNlcjpw'}", "{'authorization': 'Basic ***'}"),
        ("bearer abcdefgh12345678", "bearer ***"),
        ("postgres://train:p%40ss@db:5432/x", "postgres://train:***@db:5432/x"),
        ("https://abcdefghijklmnopqrstuvwxyz@git.example/x", "https://***@git.example/x"),
        ("https://s3/x?X-Amz-Signature=0123456789abcdef&y=1", "https://s3/x?X-Amz-Signature=***&y=1"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nafter",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nafter",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "-----BEGIN PRIVATE KEY-----***"),
        ("MIIEcutoff\nabc=\n-----END PRIVATE KEY-----\nafter", "***-----END PRIVATE KEY-----\nafter"),
    ],
)
def test_what_looks_like_a_credential_is_masked_and_its_name_stays(text: str, masked: str) -> None:
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 512, tokens/s: 5210, loss per token: 2.31",
        "token_count=12345678 pad_token='<pad>' eos_token: </s> bos_token=[BOS]",
        "tokenizer=bert-base-uncased-v12345",
        "ValueError: the password is wrong",
        "the bearer of bad news; Bearer authentication required",
        "secret: mount it",
        "signature: (int, float32) -> int64",
        "https://example.com:8080/path?x=1 and user@example.com",
        "[127.0.0.1]:45678 and pair.cc:553",
        'File "/opt/training/tokenizer.py", line 12345678, in encode',
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_what_is_no_credential_stays_as_it_is(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize(
    "unit",
    ["a", "A=", "1", " ", "\n", "-", "--", "://", "://a:", "token_", "api_key-", "password=", "password='", "-eyJ",
     "sk-", "authorization: ", "bearer a", "-----BEGIN PRIVATE KEY-----", "A" * 64 + "\n"],
)  # fmt: skip
def test_the_time_grows_with_the_length_alone(unit: str) -> None:
    short, long = (unit * (size // len(unit)) for size in (2**14, 2**18))
    a, b = cpu_seconds(short), cpu_seconds(long)
    assert b < 16 * 8 * max(a, 1e-4), f"16 times the text took {b / a:.0f} times the time"


def cpu_seconds(text: str) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        mask(text)
        times.append(time.process_time() - begun)
    return min(times)
