"""Keys that SGLang is given do not come out again where it shows, copies or hands on its arguments."""

import argparse
import copy
import dataclasses
import pickle
import secrets

import pytest
from spec_gate.secret import HIDDEN, Secret, hide_in

KEY = "a-key-of-the-server"


@dataclasses.dataclass
class ServerArgs:
    api_key: str | None
    admin_api_key: str | None = None


def parsed(*arguments: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key", type=str, default=None)
    parser.add_argument("--admin-api-key", type=str, default=None)
    hide_in(parser)
    return ServerArgs(**vars(parser.parse_args(arguments)))


def test_the_checks_of_the_server_see_the_key() -> None:
    key = parsed("--api-key", KEY).api_key
    assert key == KEY
    assert f"Bearer {key}" == f"Bearer {KEY}"
    assert secrets.compare_digest(KEY, key)
    assert not secrets.compare_digest("another", key)


def test_no_key_stays_none() -> None:
    assert parsed() == ServerArgs(None, None)


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key"])
def test_what_is_shown_copied_or_handed_on_has_no_key(option: str) -> None:
    arguments = parsed(option, KEY)
    shown = [f"{arguments=}", str(dataclasses.asdict(arguments)), repr(vars(copy.deepcopy(arguments))),
             pickle.dumps(arguments).decode("latin-1")]  # fmt: skip
    for text in shown:
        assert KEY not in text
    assert HIDDEN in vars(pickle.loads(pickle.dumps(arguments))).values()


def test_where_only_the_hidden_text_arrives_nothing_is_let_in() -> None:
    for sent in (KEY, HIDDEN, ""):
        with pytest.raises(TypeError):
            secrets.compare_digest(sent, pickle.loads(pickle.dumps(Secret(KEY))))
