"""Values that look like secrets in commands and hyper-parameters, and are kept out of files: api_key=X, for instance.

A value is a secret if its name, or one around it, ends in key, token, password or the like: `--api-key X`,
`--api_key=X`, `WANDB_API_KEY=X`, a config's `wandb.api_key` or `api_keys.openai`; and so is the password in an
address, `postgresql://user:X@host`, and a key in a query, `?token=X`. Numbers are no keys and tokens, such as
`--pad-token 0`, and neither are counts of them, such as `--max-tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

HIDDEN = "***"  # in place of a secret
_ALWAYS = re.compile(
    r"(?:.*_)?(?:passwords?|passwd|passphrase|pwd|secrets?|credentials?|authorization)(?:_[^_]+)?(?:_(?:id|value|hash))?"
)
_UNLESS_NUMBER = re.compile(
    r"(?:(?:.*_)?(?:key|apikey|token|auth)|(?:(?:.*_)?(?:api|access|auth|private|hf|wandb)_)?(?:keys|apikeys|tokens))"
    r"(?:_(?:id|value|hash))?"  # of several, other names may count something
)
_SEVERAL = ("passwords", "secrets", "credentials", "keys", "tokens")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_OPTION = re.compile(r"((?:--?)?([A-Za-z_][\w.-]*)=)(.*)", re.DOTALL)
_ADDRESS = re.compile(r"(\b\w+://[^\s/:@]*:)([^\s/@]+)(@)")  # \b: a long word is read once, not from each letter
_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|password|secret)=)([^\s&]+)", re.IGNORECASE)
_PLACE = re.compile(r"(?<![^=:])\*\*\*(?![^&@])")  # of a hidden secret
Value = TypeVar("Value")


def hide_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command with `HIDDEN` in place of each secret."""
    found: list[str] = []
    is_next = ""  # the name of an option whose value comes next
    ends = "--"  # the beginning of the word after its values
    for word in words:
        if is_next and not word.startswith(ends):
            found.append(_hide(is_next, word))
            is_next = is_next if is_next.rstrip("-_0123456789").lower().endswith(_SEVERAL) else ""
            ends = "-"
            continue
        ends = "--"
        is_next = word if word.startswith("-") and "=" not in word and _kind(word) else ""
        option = _OPTION.fullmatch(word)
        found.append(option[1] + _hide(option[2], option[3]) if option else _without_passwords(word))
    return found


def hide_in_config(config: Mapping[str, Value]) -> dict[str, Value | str]:
    """Hyper-parameters by name with `HIDDEN` in place of each secret."""
    return {
        name: _hide(name, str(value))
        if isinstance(value, str) or (value is not None and _kind(name) == "always")
        else value
        for name, value in config.items()
    }


def names_of_hidden(words: Sequence[str]) -> list[str]:
    """The text before each secret that a command lacks, such as `--api-key`."""
    found = []
    option = ""
    for word in words:
        places = [word[: place.start()].rstrip("=:") or option for place in _PLACE.finditer(word)]
        found += places
        option = option if places else word
    return found


def with_secrets(words: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """The words of a command with the secrets that it lacks, in their order."""
    values = iter(secrets)
    return [_PLACE.sub(lambda place: next(values), word) for word in words]


def _without_passwords(text: str) -> str:
    """A text with `HIDDEN` in place of the passwords and keys in its addresses."""
    return _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}\3", text))


def _kind(name: str) -> str:
    """Whether a value of this name is a secret "always" or "unless" it is a number; empty for no secret."""
    parts = ["_".join(_PARTS.findall(part)).lower().rstrip("_0123456789") for part in name.split(".")]
    if any(map(_ALWAYS.fullmatch, parts)):
        return "always"
    return "unless" if any(map(_UNLESS_NUMBER.fullmatch, parts)) else ""


def _hide(name: str, value: str) -> str:
    kind = _kind(name)
    if not kind:
        return _without_passwords(value)
    is_plain = value in ("", "None", "True", "False", "true", "false", "none")
    with suppress(ValueError):
        float(value)
        is_plain = kind == "unless"
    return value if is_plain else HIDDEN
