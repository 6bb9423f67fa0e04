"""The gate's options: names, defaults, and the configurations refused at start."""

import argparse
import json
from types import SimpleNamespace

import pytest
from spec_gate import arguments, profile, server_key
from spec_gate.policy import Settings


def server_args(*options, **changes):
    parser = argparse.ArgumentParser()
    arguments.add_to(parser)
    # What SGLang has made of a command line that the gate supports, when it calls the check.
    known = {
        "speculative_algorithm": "EAGLE3",
        "enable_dp_attention": False,
        "dp_size": 1,
        "pp_size": 1,
        "enable_multi_layer_eagle": False,
        "enable_two_batch_overlap": False,
        "disaggregation_mode": "null",
        "enable_pdmux": False,
        "speculative_adaptive": False,
        "enable_hierarchical_cache": False,
        "enable_hisparse": False,
        "enable_streaming_session": False,
        "enable_lora": False,
        "lora_paths": None,
        "enable_return_hidden_states": False,
        "enable_return_routed_experts": False,
    }
    return SimpleNamespace(**known | vars(parser.parse_args(options)) | changes)


KEY = {
    "host": "gpu-1",
    "devices": ["NVIDIA H200"],
    "driver": "570.86.10",
    "sglang_version": "0.5.12.post1",
    "series": "0.5.12.post1-000000000000",
    "model": "/models/target",
    "draft": "/models/draft",
    "tp_size": 1,
    "speculative": {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 8},
}


@pytest.fixture
def profile_path(tmp_path, monkeypatch):
    """A profile of this server."""
    monkeypatch.setattr(arguments, "server_key", lambda _server_args: KEY)
    path = tmp_path / "profile.json"
    document = profile.make(
        made="2026-01-02T03:04:05Z",
        key=KEY,
        cells=[profile.Cell(1, 128, 0.012, 0.010)],
        acceptance_seen=None,
        recommended=dict.fromkeys(profile.RECOMMENDED_FIELDS),
        why="given by a test",
    )
    path.write_text(json.dumps(document))
    return path


def test_without_options_the_gate_is_off():
    assert arguments.settings(server_args()) == Settings()


def test_each_option_reaches_its_setting():
    given = server_args(
        *("--speculative-disable-batch-threshold", "8"),
        *("--speculative-gate-low-mark", "5"),
        *("--speculative-gate-dwell-steps", "9"),
        *("--speculative-gate-kv-token-threshold", "4096"),
        *("--speculative-gate-force", "closed"),
    )
    assert arguments.settings(given) == Settings(8, low_mark=5, dwell_steps=9, kv_token_threshold=4096, forced="closed")


@pytest.mark.parametrize(
    "options",
    [
        ("--speculative-disable-batch-threshold", "-1"),
        ("--speculative-disable-batch-threshold", "5", "--speculative-gate-low-mark", "6"),
        ("--speculative-gate-force", "open"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_option(options):
    with pytest.raises(arguments.ArgumentError) as refusal:
        arguments.check(server_args(*options))
    assert str(refusal.value).startswith(options[-2])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("threshold", ["five", "5.5", ""])
def test_a_threshold_that_is_no_integer_is_refused_by_the_parser(threshold, capsys):
    with pytest.raises(SystemExit):
        server_args("--speculative-disable-batch-threshold", threshold)
    assert "--speculative-disable-batch-threshold: invalid int value" in capsys.readouterr().err


UNSUPPORTED = [
    ({"speculative_algorithm": None}, "--speculative-algorithm EAGLE3"),
    ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm EAGLE3"),
    ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm EAGLE3"),
    ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm EAGLE3"),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, "--speculative-algorithm EAGLE3"),
    ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"dp_size": 2}, "--dp-size 2"),
    ({"pp_size": 2}, "--pp-size 2"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"enable_pdmux": True}, "--enable-pdmux"),
    ({"speculative_adaptive": True}, "--speculative-adaptive"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE3"),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"enable_streaming_session": True}, "--enable-streaming-session"),
    ({"enable_lora": True}, "--enable-lora"),
    ({"lora_paths": ["adapter"]}, "--enable-lora"),
    ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
    ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
]


@pytest.mark.parametrize(("changes", "word"), UNSUPPORTED)
def test_an_untried_configuration_is_refused_in_one_sentence_and_only_with_a_gate(changes, word, profile_path):
    for option in (("--speculative-disable-batch-threshold", "5"), ("--speculative-gate-profile", str(profile_path))):
        with pytest.raises(arguments.ArgumentError) as refusal:
            arguments.check(server_args(*option, **changes))
        message = str(refusal.value)
        assert word in message
        assert " ".join(option) in message
        assert "leave" in message
        assert "\n" not in message
    arguments.check(server_args(**changes))
    arguments.check(server_args("--speculative-disable-batch-threshold", "0", **changes))


def test_the_sync_interval_has_a_default_and_no_negative_values():
    assert arguments.sync_interval(server_args()) == arguments.DEFAULT_SYNC_INTERVAL
    assert arguments.sync_interval(server_args("--speculative-gate-sync-interval", "0")) == 0
    with pytest.raises(arguments.ArgumentError, match="--speculative-gate-sync-interval is -1; allowed is 0"):
        arguments.check(server_args("--speculative-gate-sync-interval", "-1"))


def test_the_supported_configuration_passes():
    arguments.check(server_args("--speculative-disable-batch-threshold", "5"))


def test_the_profile_of_this_server_reaches_the_settings(profile_path):
    given = server_args("--speculative-gate-profile", str(profile_path), "--speculative-gate-force", "open")
    arguments.check(given)
    settings = arguments.settings(given)
    assert (settings.profile.id, settings.threshold, settings.gated) == (profile.load(profile_path).id, 0, True)


def test_a_profile_of_another_server_is_refused_with_what_differs(profile_path, monkeypatch):
    monkeypatch.setattr(arguments, "server_key", lambda _server_args: KEY | {"driver": "580.1", "host": "gpu-2"})
    for more in ((), ("--speculative-disable-batch-threshold", "5")):
        with pytest.raises(arguments.ArgumentError) as refusal:
            arguments.check(server_args("--speculative-gate-profile", str(profile_path), *more))
        assert str(refusal.value) == (
            f"--speculative-gate-profile {profile_path} was measured on another server (host was gpu-1 and is gpu-2; "
            "driver was 570.86.10 and is 580.1): calibrate again, or leave the profile out"
        )


def test_a_profile_that_cannot_be_read_is_refused_by_the_name_of_its_option(tmp_path):
    with pytest.raises(arguments.ArgumentError) as refusal:
        arguments.check(server_args("--speculative-gate-profile", str(tmp_path / "none.json")))
    assert str(refusal.value).startswith(f"--speculative-gate-profile {tmp_path}/none.json cannot be read")
    assert "\n" not in str(refusal.value)


def test_the_key_of_a_server_has_the_fields_of_a_profile(monkeypatch):
    monkeypatch.setattr(server_key.importlib.metadata, "version", {"sglang": "0.5.12.post1"}.get)
    names = {
        "device": "cpu",
        "tp_size": 2,
        "model_path": "/models/target",
        "speculative_draft_model_path": "/models/draft",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    key = server_key.server_key(SimpleNamespace(**names))
    assert tuple(key) == profile.KEY_FIELDS
    assert tuple(key["speculative"]) == profile.SHAPE_FIELDS
    assert (key["devices"], key["driver"], key["sglang_version"]) == (["cpu", "cpu"], None, "0.5.12.post1")

    monkeypatch.setenv("SGLANG_CPU_ENGINE_FORWARD_MS", "20,1")
    simulated = server_key.server_key(SimpleNamespace(**names))
    shaped = "cpu, SGLANG_CPU_ENGINE_FORWARD_MS=20,1"
    assert profile.mismatch(simulated, key) == f'devices was ["{shaped}", "{shaped}"] and is ["cpu", "cpu"]'
