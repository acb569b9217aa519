"""Check the keys of the `algorithm` section: which objective has which field, and the message for a wrong key.

A recipe that extends another may change the objective. A field that the new objective does not have is an error. `null`
removes such a field before pydantic validates the section (`algorithm.clip_high=` on the command line).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octetrl.config.algorithm import OBJECTIVES, GrpoConfig
from octetrl.config.other_names import OURS
from octetrl.config.section import Problem
from octetrl.system.errors import nearest

SECTION = "algorithm"
DEFAULT_NAME = GrpoConfig().name


def owners(field: str) -> list[str]:
    """List the objectives that have the field."""
    return [name for name, section in OBJECTIVES.items() if field in section.model_fields]


def name_objective(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Name an objective in the tree's `algorithm` section, and remove fields of other objectives that are null."""
    given = tree.get(SECTION, {})
    if not isinstance(given, dict):
        return dict(tree)
    section = {"name": DEFAULT_NAME, **given}
    kept = {key: value for key, value in section.items() if value is not None or not _is_foreign(section["name"], key)}
    return {**tree, SECTION: kept}


def misplaced_fields(name: str, fields: Iterable[str]) -> Problem:
    """Report all fields of the section that belong to other objectives, as one problem."""
    fields = list(fields)
    by_owners: dict[str, list[str]] = {}
    for field in fields:
        by_owners.setdefault(_listed(owners(field)), []).append(field)
    one = len(fields) == 1
    belong = [
        f"{'it' if one else ', '.join(group)} {'belongs' if len(group) == 1 else 'belong'} to {names}"
        for names, group in by_owners.items()
    ]
    which, nulls = "it" if one else "them", " ".join(f"{SECTION}.{field}=null" for field in fields)
    text = (
        f"{SECTION}.{', '.join(fields)}: {name} has no such field{'' if one else 's'}; {'; '.join(belong)}; remove"
        f" {which}, or give {nulls} where a base file has {which}, or choose another {SECTION}.name"
    )
    return Problem((*(f"{SECTION}.{field}" for field in fields), f"{SECTION}.name"), text)


def unknown_field(name: str, field: str) -> Problem:
    """Report a field that no objective has, and suggest the nearest known field."""
    own, ours = OBJECTIVES[name].model_fields, OURS.get(field, field).removeprefix(f"{SECTION}.")
    if ours != field and ours not in own and not owners(ours):
        return Problem((f"{SECTION}.{field}", ours), f"{SECTION}.{field}: unknown key; did you mean '{ours}'?")
    hint = nearest(ours, own)
    meant = hint.split("'")[1] if hint else ""
    if not hint:
        elsewhere = nearest(field, {key for section in OBJECTIVES.values() for key in section.model_fields})
        if elsewhere:
            meant = elsewhere.split("'")[1]
            hint = f"{elsewhere} It belongs to {_listed(owners(meant))}, not to {name}"
        else:
            hint = f"; allowed are {', '.join(own)}"
    fields = (f"{SECTION}.{field}", f"{SECTION}.{meant}") if meant else (f"{SECTION}.{field}",)
    return Problem(fields, f"{SECTION}.{field}: unknown key{hint}")


def _listed(names: list[str]) -> str:
    """Name these objectives in the shorter way: list them, or list the exceptions."""
    others = [name for name in OBJECTIVES if name not in names]
    return ", ".join(names) if len(names) <= len(others) else f"every objective except {', '.join(others)}"


def _is_foreign(name: Any, field: str) -> bool:
    section = OBJECTIVES.get(name) if isinstance(name, str) else None
    return section is not None and field not in section.model_fields and bool(owners(field))
