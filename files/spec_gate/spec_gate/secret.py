"""Keys of the server that stay in the one process that checks them.

SGLang prints its arguments at start, answers /server_info with them, and hands them to the schedulers, which answer
with them as well: the keys among them would stand in the log and in answers to holders of the lesser key.
"""

from __future__ import annotations

import argparse
from typing import Any

# Not ASCII: where a process checks keys against this one after all, SGLang's comparison fails for whatever is sent.
HIDDEN = "\N{BULLET}" * 3
ARGUMENTS = ("api_key", "admin_api_key")


class Secret(str):
    """A text that compares and formats as itself; shown by repr, copied or pickled it is HIDDEN.

    So no dump of the arguments has it (dataclasses.asdict copies) and no other process gets it. SGLang checks keys in
    its main process only: with several tokenizer processes it refuses a key.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (HIDDEN,)


def hide_in(parser: argparse.ArgumentParser) -> None:
    """Have SGLang's parser make Secrets of its keys, wherever they are given: on the command line or in --config."""
    for action in parser._actions:
        if action.dest in ARGUMENTS:
            action.type = Secret
