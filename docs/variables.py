"""Prints docs/variables.md: every variable that a person may set, from the roles' argument specifications."""

from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parent.parent / "roles"

HEAD = """# Variables

Set them in the inventory or, but for those that say "only in the inventory", with `-e name=value`, which is stronger. A
name that is not here is refused, with the nearest one that is. Made from `roles/*/meta/argument_specs.yml` by
`python docs/variables.py > docs/variables.md`.
"""

# What the playbooks hand from one role to the next; nobody sets them.
INTERNAL = {
    "acceptance_budget",
    "acceptance_task",
    "acceptance_expect_transitions",
    "cuda_idle_reason",
    "preflight_router",
    "router_batch",
    "router_hosts",
    "router_worker",
    "router_worker_key",
    "release_caches",
    "release_check_environment",
    "calibration_environment",
    "calibration_python",
    "calibration_server_arguments",
    "service_before_id",
    "service_profile",
    "service_release",
    "service_threshold",
    "service_deployment_id",
    "spec_gate_release",
    "spec_gate_site_packages",
    "spec_gate_sealed",
}


def text_of(description: str | list[str]) -> str:
    return " ".join(description if isinstance(description, list) else [description]).replace("|", "\\|").strip()


def value_of(option: dict) -> str:
    if option.get("required"):
        return "must be set"
    return f"`{yaml.safe_dump(option['default'], default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"


def main() -> None:
    print(HEAD)
    print("| variable | type | default | what it is |\n| --- | --- | --- | --- |")
    seen: set[str] = set(INTERNAL)
    paths = sorted(ROLES.glob("*/meta/argument_specs.yml"))
    roles = {path.parent.parent.name for path in paths}
    for path in paths:
        # Other roles that take a variable of these say less of it.
        others = tuple(f"{role}_" for role in roles - {path.parent.parent.name})
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            for name, option in entry.get("options", {}).items():
                if name not in seen and not name.startswith(others):
                    seen.add(name)
                    kind = "int or auto" if name == "threshold" else option["type"]
                    default = "must be set" if name == "threshold" else value_of(option)
                    print(f"| `{name}` | {kind} | {default} | {text_of(option['description'])} |")


main()
