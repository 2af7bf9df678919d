"""The requests that this server and vLLM are compared on, by the subject of the comparison."""

from collections.abc import Mapping

from tests.compatibility.vllm_cases import (
    activation,
    answers,
    chat,
    errors,
    invocations,
    keys,
    leniency,
    pooling_defaults,
    readiness,
    unset_limits,
)
from tests.compatibility.vllm_cases.case import Case

LINES: Mapping[str, tuple[Case, ...]] = {
    "Probes and lists": readiness.CASES,
    "`/invocations`": invocations.CASES,
    "Limits of 0": unset_limits.CASES,
    "`use_activation`": activation.CASES,
    "Folders without modules.json": pooling_defaults.CASES,
    "Conversations and tokens": chat.CASES,
    "Errors": errors.CASES,
    "Answers": answers.CASES,
    "Leniency": leniency.CASES,
    "Keys": keys.CASES,
}

CASES: tuple[Case, ...] = tuple(case for cases in LINES.values() for case in cases)


def key_of(kind: str, case: Case) -> str:
    """Return the name that an answer is recorded under."""
    return f"{case.method} {case.path} {case.name} ({kind})"


def cases_of(kind: str) -> list[Case]:
    """Return the cases of a kind of model."""
    return [case for case in CASES if kind in case.kinds]
