"""Texts that look like credentials never reach a status, and all other text stays unchanged."""

import datetime as dt
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpjob_operator.failures.redaction import MASK, clean, mask, shown, shown_pair
from ddpjob_operator.job import api
from ddpjob_operator.plan.finish import redacted

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
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
        ("sk-ant-api03-abc-DEF_ghi0123456789jklm sk-3fAb_cdefghijklm-nopqr", "*** ***"),
        ("sk-0123456789abcdef0123456789abcdef", "***"),
        ("glrt-abcdefghijklmnopqrst glcbt-64_abcdefghijklmnop xapp-1-A0B1C2D3E4-123", "*** *** ***"),
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
        # Credentials that are recognized by the name before the value.
        (
            "AccountName=a;AccountKey=abcdEFGH0123/+xyz==;EndpointSuffix=x",
            "AccountName=a;AccountKey=***;EndpointSuffix=x",
        ),
        ("SharedAccessKey=abcdefghijklmnop=", "SharedAccessKey=***"),
        ("https://a.blob.core/x?sv=2022&sig=ab%2Bcd%3D&se=2031", "https://a.blob.core/x?sv=2022&sig=***&se=2031"),
        ("{'aws_session_token': 'FwoGZXIvYXdzEKrrrr'}", "{'aws_session_token': '***'}"),
        ("client_secret=abcdefghijkl", "client_secret=***"),
        ('"storage_key": "abcdefgh"', '"storage_key": "***"'),
        ("MYSQL_PWD=x1 mysql", "MYSQL_PWD=*** mysql"),
        ("Server=db;User=u;Pwd=a;Encrypt=1", "Server=db;User=u;Pwd=***;Encrypt=1"),
        ("db_password_prod=abc", "db_password_prod=***"),
        ("mysql --password hunter2 -h db", "mysql --password *** -h db"),
        ("machine db login me password hunter2", "machine db login me password ***"),
        ("machine db\n      login me\n      password a1", "machine db\n      login me\n      password ***"),
        # Commands as printed by subprocess.CalledProcessError and shlex.
        ("['train.py', '--wandb_key', '0123456789abcdef'] returned", "['train.py', '--wandb_key', '***'] returned"),
        ('["--db-password", "a b", "--lr"]', '["--db-password", "***", "--lr"]'),
        ("['--password', 'hunter2']", "['--password', '***']"),
        (
            "aws configure set aws_secret_access_key wJalrXUtnFEMI/K7MDENG",
            "aws configure set aws_secret_access_key ***",
        ),
        ("curl -u me:hunter2 https://x", "curl -u me:*** https://x"),
        ("sshpass -p hunter2 ssh x", "sshpass -p *** ssh x"),
        ("Cookie: session=abc; other=def", "Cookie: ***"),
        ("{'Set-Cookie': 'sid=abc; Path=/', 'x': 1}", "{'Set-Cookie': '***', 'x': 1}"),
        ("JSESSIONID=0123456789ab", "JSESSIONID=***"),
        ("Authorization: ApiKey abc", "Authorization: ApiKey ***"),
        ("x-api-key: abcdefgh", "x-api-key: ***"),
        ("wandb login 0123456789abcdef0123456789abcdef01234567", "wandb login ***"),
        (
            "wandb: Appending key for api.wandb.ai: 0123456789abcdef0123456789abcdef01234567",
            "wandb: Appending key for api.wandb.ai: ***",
        ),
        ('{"username":"me","key":"0123456789abcdef0123456789abcdef"}', '{"username":"me","key":"***"}'),
        ("KAGGLE_KEY=0123456789abcdef0123456789abcdef", "KAGGLE_KEY=***"),
        ('{"auths":{"ghcr.io":{"auth":"dXNlcjpwYXNzd29yZA=="}}}', '{"auths":{"ghcr.io":{"auth":"***"}}}'),
        ("//registry.npmjs.org/:_auth=dXNlcjpwYXNzd29yZA==", "//registry.npmjs.org/:_auth=***"),
        ("client-key-data: LS0tLS1CRUdJTiBSU0E=", "client-key-data: ***"),
        ("DB_PASS=hunter2secret", "DB_PASS=***"),
        ("smtp_pass: 'hunter2secret'", "smtp_pass: '***'"),
        ("--db-password 'a b c' --lr 1", "--db-password '***' --lr 1"),
        ("docker login -u me -p hunter2 ghcr.io", "docker login -u me -p *** ghcr.io"),
        ("mysql -u root -phunter2 db", "mysql -u root -p*** db"),
        ("curl --user=me:hunter2 https://x", "curl --user=me:*** https://x"),
        ("Authorization: OAuth abc", "Authorization: OAuth ***"),
        ("LTAI5tAbCdEfGhIjKlMnOpQr", "***"),
        # Credentials in URLs; a password may contain an @.
        ("postgresql://user:p@ss:w0rd@h/db", "postgresql://user:***@h/db"),
        ("redis://:p/ss@h:6379/0", "redis://:***@h:6379/0"),
        ("amqp://u:a@h1,amqp://u:b@h2", "amqp://u:***@h1,amqp://u:***@h2"),
        # Credentials that are recognized by their form.
        ("post https://hooks.slack.com/services/T0/B0/abc now", "post https://hooks.slack.com/services/*** now"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks/***"),
        ("npm_abcdefghijklmnopqrstuvwxyz0123456789", "***"),
        ("dapi0123456789abcdef0123456789abcdef", "***"),
        ("glpat-abcdefghijklmnopqrst", "***"),
        ("pypi-AgEIcHlwaS5vcmcCJGFiY2RlZmdoaWprbG1ub3A", "***"),
        ("dckr_pat_abcdefghijklmnopqrstuvwxyz", "***"),
        ("nvapi-abcdefghijklmnopqrstuvwxyz", "***"),
        ("xoxb-1234567890-abcdef", "***"),
        ("sk_live_abcdefghijklmnop", "***"),
        ("SG.abcdefghijklmnop.abcdefghijklmnop", "***"),
        ("hvs.abcdefghijklmnopqrstuvwx", "***"),
        ("ya29.abcdefghijklmnopqrstuvwx", "***"),
        ("abc8Q~abcdefghijklmnopqrstuvwxyz012345", "***"),
        (f"key is {'Ab1/' * 21}Ab==", "key is ***"),
        ("MIIEcutoff\nabc=\n-----END PRIVATE KEY-----\nafter", "***-----END PRIVATE KEY-----\nafter"),
    ],
)
def test_text_that_looks_like_a_credential_is_masked_and_its_name_is_kept(text: str, masked: str) -> None:
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
        "commit 0123456789abcdef0123456789abcdef01234567, image sha256:" + "ab" * 32,
        "step 12840 of 100000, loss 0.4123, 5,210 samples/s, epoch=3, seed=123456789",
        "/home/me/project/tokenizer/checkpoint-12840/model.safetensors",
        'secret "wandb-key-12345678" not found; secretName: regcred-12345678; token_file=/var/run/secrets/token1234',
        "PWD=/home/me/project1234 OLDPWD=/home/me/other1234",
        "ValueError: unexpected token: identifier",
        "pod 7d0c6f1e-0000-4000-8000-000000000001 on node gpu-pool-a1b2c3d4-e5f6",
        "git+https://github.com/org/repo.git@v1.2.3 and http://host:8080/@scope/pkg",
        "s3://bucket/dataset_key=train_split_v2/part-00001.parquet",
        "cookie: monster; the session lasted; sort_key=created_at_time",
        "RuntimeError: Expected all tensors on cuda:0, found cpu",
        "first pass: 0.42 s; forward_pass=0.123456 backward_pass: 12.5 ms; --two-pass mode",
        "auth: enabled; author: somebody1234; key: model.layers.0.weight",
        "ssh login1 -p 2222 on the login node: srun -p gpu-a100",
        "kernel 6.1.0-18-amd64, torch 2.13.0+cu128, nccl 2.27.3",
        # Names of jobs, options and folders that begin like a known kind of token.
        "rank 0 (pod global-llm-pretrain-1-0, node gpu-1) and pod sk-llama-finetune-run-1-0, xapp-anomaly-detector-1-0",
        "train.py: error: unrecognized arguments: --global-batch-size-per-device 8",
        "--use-auth-token --gradient-accumulation-steps 4 and ['--ask-password', '--host', 'db']",
        "/data/glue-finetuned-bert-base/config.json, glove-embeddings-6b-300d.txt",
        "abfss://training-datasets-prod-eu@account.dfs.core.windows.net/train",
        "cls_token: torch.float32, token_embeddings: torch.Size([50257, 768]), token-classification: conll2003-ner",
    ],
)
def test_text_that_is_no_credential_is_kept(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize(
    "unit",
    ["a", "A=", "1", " ", "\n", "-", "--", "://", "://a:", "token_", "api_key-", "password=", "password='", "-eyJ",
     "sk-", "mysql ", "docker login ", " -p", "auth=", "key=0", "_pass",
     "authorization: ", "bearer a", "-----BEGIN PRIVATE KEY-----", "A" * 64 + "\n"],
)  # fmt: skip
def test_redaction_takes_linear_time(unit: str) -> None:
    short, long = (unit * (size // len(unit)) for size in (2**12, 2**16))
    a, b = cpu_seconds(short), cpu_seconds(long)
    assert b < 16 * 8 * max(a, 1e-4), f"16 times the text took {b / a:.0f} times the time"


def cpu_seconds(text: str) -> float:
    """Return the CPU seconds that masking this text takes, as the minimum of three runs."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        mask(text)
        times.append(time.process_time() - begun)
    return min(times)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\x1b[2J\x1b[1;1H\x1b]0;owned\x07 State: Succeeded", " State: Succeeded"),
        ("\x1b[31mred\x1b[0m \x9b1mbold", "red bold"),
        ("\x1b]8;;https://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x1b]52;c;c2VjcmV0\x07\x1bP1$r\x1b\\\x1b_x\x9c.", "."),
        ("\x1b]0;no end, and the next line\nis not lost", "0;no end, and the next line\nis not lost"),
        ("\x1bc\x1b(0\x1b7 \x1b", " "),
        ("a\x00b\x08c\x7fd\x85e", "abcde"),
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("user\u202egnp.exe\u202c \u2066x\u2069 \u200bz\ufeff", "usergnp.exe x z"),
        ("\U000e0041\U000e007fhidden", "hidden"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("Grüße, 日本語, é, 👩\u200d🔬, tab\there", "Grüße, 日本語, é, 👩\u200d🔬, tab\there"),
    ],
)
def test_terminal_control_and_invisible_characters_are_removed_and_all_else_is_kept(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_shown_text_is_one_line_and_a_credential_hidden_by_escapes_is_masked_too() -> None:
    assert shown("pass\u200bword=hunter2\nState: Succeeded\n", 100) == "password=*** State: Succeeded"
    assert shown("hf_abcdefghij\x1b[0mklmnopqrstuvwxyz", 100) == "***"
    assert shown("x" * 500, 300) == "x" * 298 + " …"


ANYTHING = st.lists(
    st.sampled_from(
        ["\x1b[", "\x1b]", "\x07", "\n", "\u202e", "password=", "token: ", "://u:", "@", "a", "1", "\ud800"]
    )
    | st.text(max_size=12)
).map("".join)


@settings(max_examples=150, deadline=None)
@given(ANYTHING)
def test_any_shown_text_is_clean_and_cleaning_is_idempotent(text: str) -> None:
    once = shown(text, 4096)
    assert shown(once, 4096) == once
    assert clean(once) == once
    assert "\n" not in once
    once.encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "hunter2"),
        ("password", "12345"),
        ("db_password", "correct horse, battery"),
        ("dbPassword", ";x"),
        ("Password (DB)", "x"),
        ("pwd", "hunter2"),
        ("passphrase", "a b"),
        ("api_token", "abc"),
        ("api_token", "12345678"),
        ("apiToken", "abc"),
        ("API token", "abc"),
        ("client.secret", "x y"),
        ("secret", "1234"),
        ("api-key", "77"),
        ("optim/access_token", "abc"),
        ("token", "s3cret"),
        ("credentials", "me:you"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI"),
        ("secret_of_db", "hunter2"),
        ("authorization", "Bearer abcdefgh12345678"),
        ("bearer", "hunter2"),
    ],
)
def test_a_metric_named_like_a_credential_is_masked(name: str, value: str) -> None:
    """A name and a value may look like a credential only together, so both must be checked at once."""
    assert shown_pair(name, value, 64) == (name, MASK)
    reported = api.Status(progress=api.Progress(step=1, updated=NOW, metrics={name: value, "loss": "0.25"}))
    kept = redacted(reported, api.Status()).progress
    assert kept.metrics == {name: MASK, "loss": "0.25"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "0.25"),
        ("tokens", "512"),
        ("max_tokens", "512"),
        ("token_accuracy", "0.93"),
        ("tokens_per_second", "1.5e5"),
        ("tokensPerSecond", "153,000"),
        ("pass@1", "0.43"),
        ("pass_rate", "43%"),
        ("first_pass", "1"),
        ("eos_token", "2"),
        ("secret_sharing_loss", "0.31"),
        ("key_loss", "nan"),
        ("auth_error", "0.1"),
        ("secretName", "db"),
        ("token_file", "/run/x"),
        ("epoch", "3/10"),
        ("phase", "warm-up"),
        ("", ""),
    ],
)
def test_a_metric_that_is_no_credential_stays_readable(name: str, value: str) -> None:
    assert shown_pair(name, value, 64) == (name, value)


@given(st.text(max_size=80), st.text(max_size=80))
def test_a_masked_metric_is_not_masked_again(name: str, value: str) -> None:
    """Masking a masked metric must not change it: otherwise each write of the status would change it again."""
    masked = shown_pair(name, value, 64)
    assert shown_pair(*masked, 64) == masked
