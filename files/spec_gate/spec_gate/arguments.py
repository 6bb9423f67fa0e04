"""The gate's arguments on SGLang's command line, and the configurations that it refuses at start.

The fields on SGLang's ServerArgs have the options' names; None means that the option was not given.
"""

from __future__ import annotations

import argparse
from typing import Any

from spec_gate import profile as profiles
from spec_gate import secret
from spec_gate.policy import DEFAULT_DWELL_STEPS, Settings, SettingsError
from spec_gate.server_key import server_key

# Setting of the policy: the field of ServerArgs that carries it.
FIELDS = {
    "threshold": "speculative_disable_batch_threshold",
    "low_mark": "speculative_gate_low_mark",
    "dwell_steps": "speculative_gate_dwell_steps",
    "kv_token_threshold": "speculative_gate_kv_token_threshold",
    "forced": "speculative_gate_force",
}

PROFILE = "speculative_gate_profile"
SYNC_INTERVAL = "speculative_gate_sync_interval"
DEFAULT_SYNC_INTERVAL = 32


class ArgumentError(ValueError):
    """SGLang's arguments are not what the gate can serve. The message is one sentence that ends in what to do."""


def option(field: str) -> str:
    """The option of a field: "speculative_gate_force" is --speculative-gate-force."""
    return "--" + field.replace("_", "-")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the gate's options to SGLang's parser. Values are judged by `settings`, which names what is allowed.

    Of SGLang's own options only the keys are touched: they are kept out of what it prints and answers.
    """
    secret.hide_in(parser)
    group = parser.add_argument_group("speculation gate")
    group.add_argument(
        option(FIELDS["threshold"]),
        type=int,
        metavar="N",
        help="Switch speculation off at N running requests, and on again when load falls. 0 or absent: never.",
    )
    group.add_argument(
        option(FIELDS["low_mark"]),
        type=int,
        metavar="N",
        help="Switch speculation on again below N running requests. Default: three quarters of the threshold.",
    )
    group.add_argument(
        option(FIELDS["dwell_steps"]),
        type=int,
        metavar="N",
        help="Least number of decode steps for which speculation stays off before it is switched on again. "
        f"Default: {DEFAULT_DWELL_STEPS}.",
    )
    group.add_argument(
        option(FIELDS["kv_token_threshold"]),
        type=int,
        metavar="N",
        help="Switch speculation off at N resident KV tokens of the running requests as well. 0 or absent: never.",
    )
    group.add_argument(
        option(FIELDS["forced"]),
        choices=["open", "closed"],
        help="Hold speculation on (open) or off (closed) whatever the load, for measurements.",
    )
    group.add_argument(
        option(PROFILE),
        metavar="PATH",
        help="Switch speculation by the acceptance of late and this profile of the host's step costs, unless a "
        "threshold above 0 is given.",
    )
    group.add_argument(
        option(SYNC_INTERVAL),
        type=int,
        metavar="N",
        help="Steps without speculation after which the draft model catches up with the tokens of these steps, in one "
        f"forward. 0: never, and speculation starts cold. Default: {DEFAULT_SYNC_INTERVAL}.",
    )


def sync_interval(server_args: Any) -> int:
    """Closed steps between two syncs of the draft; 0 for none. Raises ArgumentError when the value is not allowed."""
    given = getattr(server_args, SYNC_INTERVAL)
    if given is None:
        return DEFAULT_SYNC_INTERVAL
    if given < 0:
        raise ArgumentError(f"{option(SYNC_INTERVAL)} is {given}; allowed is 0 (never) or more: correct it")
    return given


def profile(server_args: Any) -> profiles.Profile | None:
    """The profile that was given; None without one. Raises ArgumentError when it cannot be read or is not sound."""
    path = getattr(server_args, PROFILE)
    if path is None:
        return None
    try:
        return profiles.load(path)
    except profiles.ProfileError as error:
        raise ArgumentError(f"{option(PROFILE)} {error}") from None


def settings(server_args: Any) -> Settings:
    """The policy's settings from SGLang's arguments. Raises ArgumentError when a value is not allowed."""
    given = {name: getattr(server_args, field) for name, field in FIELDS.items()}
    given["profile"] = profile(server_args)
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        raise ArgumentError(f"{option(FIELDS[error.setting])} {error.message}") from None


def check(server_args: Any) -> None:
    """Refuse what the gate cannot serve or has not been tried with: raises ArgumentError.

    To be called when SGLang has chosen the overlap schedule, and before it drops an adaptive speculation it cannot do.
    Without a threshold and a profile every configuration passes: the gate is off.
    """
    chosen = settings(server_args)
    sync_interval(server_args)
    if not chosen.gated:
        return
    gate, other = f"{option(FIELDS['threshold'])} {chosen.threshold}", "the threshold"
    if chosen.threshold == 0:
        gate, other = f"{option(PROFILE)} {getattr(server_args, PROFILE)}", "the profile"
    algorithm = server_args.speculative_algorithm
    if algorithm != "EAGLE3":
        raise ArgumentError(
            f"{gate} needs --speculative-algorithm EAGLE3, given is {algorithm}: give that or leave {other} out"
        )
    refused = {
        "--enable-dp-attention": server_args.enable_dp_attention,
        f"--dp-size {server_args.dp_size}": server_args.dp_size > 1,
        f"--pp-size {server_args.pp_size}": server_args.pp_size > 1,
        "--enable-multi-layer-eagle": server_args.enable_multi_layer_eagle,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        f"--disaggregation-mode {server_args.disaggregation_mode}": server_args.disaggregation_mode != "null",
        "--enable-pdmux": server_args.enable_pdmux,
        "--speculative-adaptive": server_args.speculative_adaptive,
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--enable-hisparse": server_args.enable_hisparse,
        "--enable-streaming-session": server_args.enable_streaming_session,
        "--enable-lora": server_args.enable_lora or server_args.lora_paths,
        # Closed, the hidden states are the draft's: several layers' in one.
        "--enable-return-hidden-states": server_args.enable_return_hidden_states,
        "--enable-return-routed-experts": server_args.enable_return_routed_experts,
    }
    for what, present in refused.items():
        if present:
            raise ArgumentError(f"{gate} does not work with {what}: leave one of the two out")
    if chosen.profile is not None:
        differing = profiles.mismatch(chosen.profile.key, server_key(server_args))
        if differing is not None:
            raise ArgumentError(
                f"{option(PROFILE)} {getattr(server_args, PROFILE)} was measured on another server ({differing}): "
                "calibrate again, or leave the profile out"
            )
