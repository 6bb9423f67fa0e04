"""What is refused of the server's variables before any host is reached: open secrets, unfit keys, every interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_deploy_refusals import deploy

KEY = "0123456789abcdef"
ARGUMENTS = {"model-path": "/m", "max-running-requests": 8}


def refusal(tmp_path: Path, **variables: Any) -> str:
    given = tmp_path / "given.yml"
    given.write_text(json.dumps({"threshold": 5, "service_server_arguments": ARGUMENTS} | variables))
    status, output = deploy(tmp_path, "-e", f"@{given}")
    assert status != 0
    return output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"service_api_key": "short"}, "service_api_key: a key has at least 16 characters"),
        ({"service_admin_api_key": KEY + " "}, "service_admin_api_key: a key has at least 16 characters"),
        ({"service_api_key": KEY + "ä"}, "service_api_key: a key has at least 16 characters"),
        (
            {"service_api_key": KEY, "service_server_arguments": ARGUMENTS | {"tokenizer-worker-num": 2}},
            "SGLang checks keys in one tokenizer process only",
        ),
        (
            {"service_server_arguments": ARGUMENTS | {"ssl-keyfile-password": KEY}},
            "service_server_arguments has ssl-keyfile-password. Everybody on the host can read command lines",
        ),
        ({"service_server_arguments": ARGUMENTS | {"config": "/x.yaml"}}, "config have variables of their own"),
        ({"service_credentials": {"../key": KEY}}, "service_credentials has ../key. Names are letters"),
        ({"service_environment": {"HF_TOKEN": KEY, "A": "1"}}, "has what looks like a secret: HF_TOKEN. Its values"),
        ({"service_environment": {"PGPASSWORD": KEY}}, "service_environment has what looks like a secret: PGPASSWORD"),
        (
            {"service_environment": {"SGLANG_S3_SECRET_ACCESS_KEY": KEY, "openai_api_key": KEY}},
            "a secret: openai_api_key, SGLANG_S3_SECRET_ACCESS_KEY. Its values stand in command lines",
        ),
        (
            {"release_environment": {"UV_DEFAULT_INDEX": f"https://me:{KEY}@pypi.example.org/simple"}},
            "release_environment has what looks like a secret: UV_DEFAULT_INDEX",
        ),
        (
            {"release_environment": {"PIP_INDEX_URL": f"https://{KEY}@pypi.example.org/simple"}},
            "goes into ~root/.netrc on the host",
        ),
        ({"cuda_environment": {"https_proxy": f"socks5://me:{KEY}@proxy:1"}}, "cuda_environment has what looks like"),
        ({"service_address": "0.0.0.0"}, "service_address is '0.0.0.0', every interface of the host"),
        ({"service_address": "::"}, "service_address is '::', every interface of the host"),
        ({"service_address": "192.0.2.4"}, "service_networks does not say who may reach it"),
        (
            {"service_networks": ["router.example.org"]},
            "service_networks has router.example.org. Allowed are addresses",
        ),
    ],
)
def test_before_any_host_is_reached(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    output = refusal(tmp_path, **given)
    assert reason in output
    assert "Nothing was touched" in output
    assert "Cannot become root" not in output
    assert KEY not in output


def test_what_is_allowed_is_followed_by_a_connection(tmp_path: Path) -> None:
    output = refusal(
        tmp_path, service_api_key=KEY, service_address="0.0.0.0", service_all_interfaces=True,
        service_networks=["192.0.2.10", "fd00::/8"],
        service_credentials={"hf-token": KEY},
        service_environment={
            "HF_TOKEN_PATH": "/run/credentials/sglang.service/hf-token",
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0.14",
            "SGLANG_USE_AITER_FP8_PER_TOKEN": 1,
            "NCCL_IB_PKEY": "0x7fff",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": True,
            "HF_ENDPOINT": "https://hub.example.org/a@b",
        },
    )  # fmt: skip
    assert "Cannot become root on gpu-1" in output
    assert KEY not in output
