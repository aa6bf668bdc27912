"""Release by check, from the reports of ``pytest --junitxml``: ``python -m tests.engine.table REPORT.xml...``."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree as ET

from patchkit.catalog import release_key
from tests.engine.harness import TOLERANCE

CHECKS = {
    "one, batch, 2,000, ten clients": "single_batched_long_and_concurrent",
    "chunks": "chunks_of_a_prompt.*chunks alone",
    "chunks and radix cache, twice": "chunks_of_a_prompt.*radix cache",
    "--tp 2": "both_ranks",
    "answers bit for bit": "answers_are_the_same_bits",
    "mistakes found": "each_mistake",
    "V2": "deepseek_v2",
    "Llama": "family_agree.*llama",
    "Qwen2": "family_agree.*qwen2",
    "Qwen3": "family_agree.*qwen3(?!-moe)",
    "Qwen3 MoE": "family_agree.*qwen3-moe",
    "refusals": "wrong_configuration_is_refused",
}


def cell(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "FAILED"
    found = [p.get("value") for p in case.iter("property") if p.get("name") == "worst_error"]
    return f"{float(found[0] or 0):.1e}" if found and "mistake" not in str(case.get("name")) else "yes"


def main() -> None:
    cases = [case for path in sys.argv[1:] for case in ET.parse(path).iter("testcase")]
    table: dict[str, dict[str, str]] = {}
    for case in cases:
        name = case.get("name", "")
        release = re.search(r"\[.*?(\d+\.\d+\.\d+(?:\.?[a-z]+\d+)?)", name)
        for title, pattern in CHECKS.items():
            if release and re.search(pattern, name):
                table.setdefault(release[1], {})[title] = cell(case)
    print(f"Worst error of a state's row against Transformers; {TOLERANCE:g} is allowed.\n")
    print("| release | " + " | ".join(CHECKS) + " |")
    print("|---" * (len(CHECKS) + 1) + "|")
    for release in sorted(table, key=release_key):
        print(f"| {release} | " + " | ".join(table[release].get(title, "") for title in CHECKS) + " |")


if __name__ == "__main__":
    main()
