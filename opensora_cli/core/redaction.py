"""Redaction of reports: relevant variables, without users, hosts, folders and tokens."""

import getpass
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

from opensora_cli.core.formatting import without_credentials

_RELEVANT = re.compile(
    r"(CUBLAS|CUDA|CUDNN|GLOO|HF|HUGGING_FACE|MKL|NCCL|NVIDIA|OMP|OSORA|PYTORCH|TORCH|TRANSFORMERS)_\w+|LD_LIBRARY_PATH"
)
_HIDDEN = "<hidden>"
_SECRET_NAME = re.compile(
    r"(?i)TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|APIKEY|API_KEY|ACCESS_KEY|PRIVATE_KEY|_AUTH\b|_KEY\b"
)
# NCCL variables identify a host or an address of its ranks; interfaces are often named after hardware addresses.
_HOST_NAME = re.compile(r"(?i)(MASTER_ADDR|HOSTNAME|_HOST|_ADDR|ENDPOINT|_HOSTID|_COMM_ID|_IFNAME|_HCA)\b")
_TOKENS = re.compile(
    r"\b(hf_\w{8,}|gh[opsur]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|sk-[\w-]{8,}|xox[abp]-[\w-]{8,}|AKIA\w{12,}|"
    r"eyJ[\w-]{8,}\.[\w.-]+|[0-9a-fA-F]{32,})"
)
_SERIALS = re.compile(
    r"\b(GPU-|MIG-)?[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b(GPU|MIG)-[0-9a-fA-F]{8,}\b"
)
"""UUIDs of GPUs in CUDA_VISIBLE_DEVICES, whole or shortened."""
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(\S+)")
_PART = r"[^\s/:,;'\"()<>]+"
# Names of folders may contain blanks; only before the last slash, they can be distinguished from words.
BEFORE_PATH, ABSOLUTE_PATH = r"(?<![\w/<>.@-])", rf"(?:/{_PART}(?: {_PART})*(?=/))*/{_PART}/?"
"""Patterns of the place before a path in a text, and of an absolute path there."""
_PATH = re.compile(BEFORE_PATH + ABSOLUTE_PATH)
_SYSTEM_ROOTS = frozenset({"dev", "etc", "lib", "lib64", "proc", "sys", "usr"})
"""Folders whose names do not identify a user."""


def is_relevant(name: str) -> bool:
    """Return whether an environment variable can change what osora does."""
    return bool(_RELEVANT.fullmatch(name))


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: shown_value(name, environment[name]) for name in sorted(filter(is_relevant, environment))}


def shown_value(name: str, value: str) -> str:
    if _SECRET_NAME.search(name):
        return _HIDDEN
    return without_credentials(_TOKENS.sub(_HIDDEN, value))


class Redactor:
    """Redactor of texts. `names` maps names of users and hosts to replacements."""

    def __init__(self, names: Mapping[str, str]) -> None:
        # Longest first, so that a whole host name is replaced before its first part.
        self._names = sorted(((name, shown) for name, shown in names.items() if name), key=lambda item: -len(item[0]))

    @classmethod
    def of_this_machine(cls) -> "Redactor":
        names = {}
        with suppress(KeyError, OSError):  # in a container, a user may have no name
            names[getpass.getuser()] = "<user>"
        names.pop("root", None)  # it identifies no one
        host = socket.gethostname()
        return cls({**names, host: "<host>", host.partition(".")[0]: "<host>"})

    def text(self, text: str) -> str:
        text = _ASSIGNED.sub(lambda match: f"{match[1]}={_variable(match[1], match[2])}", text)
        text = _SERIALS.sub(_HIDDEN, without_credentials(_TOKENS.sub(_HIDDEN, text)))
        text = _PATH.sub(lambda match: match[0] if match[0].split("/")[1] in _SYSTEM_ROOTS else "<path>", text)
        for name, shown in self._names:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
        return text

    def document(self, value: object, name: str = "") -> object:
        """Return a JSON value with every text redacted; `name` is its key, which may be that of a variable."""
        if isinstance(value, str):
            return self.text(_variable(name, value))
        if isinstance(value, Mapping):
            return {key: self.document(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.document(item) for item in value]
        return value


def _variable(name: str, value: str) -> str:
    """Return the value of a variable, hidden if its name suggests a secret or a host; other names change nothing."""
    if not name.isupper():
        return value
    return _HIDDEN if _HOST_NAME.search(name) else shown_value(name, value)
