"""What looks like a secret in a command or in hyper-parameters, and is kept out of files: a name such as api_key.

A value is a secret if its name ends in key, token, password or the like: `--api-key X`, `--api_key=X`,
`WANDB_API_KEY=X`, a config's `wandb.api_key` or `secrets.openai`; and so is the password in an address,
`postgresql://user:X@host`, and a key in a query, `?token=X`. Numbers are no keys and tokens, such as `--pad-token 0`,
nor is what counts them, such as `--max-tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

HIDDEN = "***"  # in place of a secret
_ALWAYS = frozenset({"password", "passwd", "passphrase", "pwd", "secret", "credential", "authorization"})
_SEVERAL_ALWAYS = frozenset({"passwords", "secrets", "credentials"})
_UNLESS_NUMBER = frozenset({"key", "apikey", "token", "auth"})
_SEVERAL = frozenset({"keys", "apikeys", "tokens"})
_BEFORE_SEVERAL = frozenset({"api", "access", "auth", "private", "hf", "wandb"})  # else the name may count something
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_OPTION = re.compile(r"(--?)?([A-Za-z_][\w.-]*)(=)(.*)", re.DOTALL)
_ADDRESS = re.compile(r"(\b\w+://[^\s/:@]*:)([^\s/@]+)(@)")  # \b: a long word is read once, not from each letter
_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|password|secret)=)([^\s&]+)", re.IGNORECASE)
_PLACE = re.compile(r"(?<![^=:])\*\*\*(?![^&@])")  # of a hidden secret
Value = TypeVar("Value")


def hide_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command with `HIDDEN` in place of each secret."""
    found: list[str] = []
    is_next = ""  # the name of an option whose value comes next
    ends = "--"  # what the word after its values begins with
    for word in words:
        if is_next and not word.startswith(ends):
            found.append(_hide(is_next, word))
            is_next = is_next if _is_of_several(is_next) else ""
            ends = "-"
            continue
        ends = "--"
        is_next = word if word.startswith("-") and "=" not in word and _kind(word) else ""
        option = _OPTION.fullmatch(word)
        if option is not None and _kind(option[2]):
            found.append(word[: option.end(3)] + _hide(option[2], option[4]))
        else:
            found.append(_without_passwords(word))
    return found


def hide_in_config(config: Mapping[str, Value]) -> dict[str, Value | str]:
    """Hyper-parameters by name with `HIDDEN` in place of each secret."""
    found: dict[str, Value | str] = {}
    for name, value in config.items():
        is_text = isinstance(value, str)
        is_secret = bool(_kind(name)) and (is_text or (_kind(name) == "always" and value is not None))
        found[name] = _hide(name, str(value)) if is_secret else value
        if is_text and not is_secret:
            found[name] = _without_passwords(str(value))
    return found


def has_hidden(words: Sequence[str]) -> bool:
    """Whether a command lacks a secret that was hidden."""
    return any(map(_PLACE.search, words))


def names_of_hidden(words: Sequence[str]) -> list[str]:
    """Of each secret that a command lacks what comes before it, such as `--api-key`."""
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
    """A text with `HIDDEN` in place of what addresses in it hold."""
    return _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}\3", text))


def _words_of(name: str) -> list[str]:
    """The words of the last part of a dotted name, without a number at the end."""
    words = [word.lower() for word in _PARTS.findall(name.rpartition(".")[2])]
    while words and words[-1].isdigit():
        words.pop()
    return words


def _is_of_several(name: str) -> bool:
    """Whether an option of this name may have several values."""
    return not (_SEVERAL | _SEVERAL_ALWAYS).isdisjoint(_words_of(name)[-1:])


def _kind(name: str) -> str:
    """Whether a value of this name is a secret "always" or "unless" it is a number; empty for no secret."""
    parts = _words_of(name)
    if len(parts) > 1 and parts[-1] in ("id", "value", "hash"):
        parts.pop()
    if not (_ALWAYS | _SEVERAL_ALWAYS).isdisjoint(parts[-2:]) or not _SEVERAL_ALWAYS.isdisjoint(name.split(".")[:-1]):
        return "always"
    if parts[-1:] and parts[-1] in _SEVERAL:
        return "unless" if len(parts) == 1 or parts[-2] in _BEFORE_SEVERAL else ""
    return "unless" if not _UNLESS_NUMBER.isdisjoint(parts[-1:]) else ""


def _hide(name: str, value: str) -> str:
    is_plain = value in ("", "None", "True", "False", "true", "false", "none")
    with suppress(ValueError):
        float(value)
        is_plain = _kind(name) == "unless"
    return value if is_plain else HIDDEN
