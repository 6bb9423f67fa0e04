"""How a conversation is written as text: role tokens, chat template, and the same rendering in Python for training."""

from typing import Literal, TypedDict

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    role: Role
    content: str


END = "<|end|>"  # ends every message; the model's end-of-sequence token
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
ROLE_TOKENS = {role: f"<|{role}|>" for role in ROLES}
SPECIAL_TOKENS = (END, *ROLE_TOKENS.values())

# Jinja, as chat_template in tokenizer_config.json. No token stands before the first message, so that text sent without
# a template is tokenised as it is.
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}
{{- raise_exception("message role is " ~ message.role ~ "; allowed: system, user, assistant") -}}
{%- endif -%}
{{- "<|" ~ message.role ~ "|>" ~ message.content ~ "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


def render(messages: list[Message]) -> str:
    """The text of whole messages, each ended: what TEMPLATE gives without a generation prompt."""
    return "".join(ROLE_TOKENS[message["role"]] + message["content"] + END for message in messages)
