"""The gate's options: names, defaults, and the configurations refused at start."""

import argparse
from types import SimpleNamespace

import pytest
from spec_gate import arguments
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
def test_an_untried_configuration_is_refused_in_one_sentence_and_only_with_a_threshold(changes, word):
    with pytest.raises(arguments.ArgumentError) as refusal:
        arguments.check(server_args("--speculative-disable-batch-threshold", "5", **changes))
    message = str(refusal.value)
    assert word in message
    assert "--speculative-disable-batch-threshold 5" in message
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
