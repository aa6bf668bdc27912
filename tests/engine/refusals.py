"""What hsdump says to configurations, as this SGLang itself reads them. Run by the engine's interpreter.

Input: ``model``, ``dump`` (the patched tree's hs_dump.py) and ``configurations`` (name -> arguments).
Output: name -> ``["unknown", why]``, ``["sglang", its refusal]``, ``["hsdump", our refusal]`` or ``["served", ""]``.
No GPU is needed to ask, not even with ``--device=cuda``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys


def parse(prepare, model, arguments):
    """SGLang's decided arguments, or an answer that there are none."""
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words), contextlib.redirect_stdout(words):
            parsed = prepare([f"--model-path={model}", "--skip-tokenizer-init", *arguments])
            if hasattr(parsed, "resolve_once"):  # in later releases parsing does not decide yet
                parsed.resolve_once()
            return parsed, None
    except SystemExit:
        last = words.getvalue().strip().splitlines()[-1]
        unknown = "unrecognized arguments" in last or "invalid choice" in last
        return None, ["unknown" if unknown else "sglang", last]
    except Exception as error:  # noqa: BLE001 (SGLang's refusals have no type of their own)
        return None, ["sglang", f"{type(error).__name__}: {error}".splitlines()[0]]


def main():
    task = json.load(sys.stdin)
    os.environ["SGLANG_HS_DUMP_DIR"] = "/nowhere"  # the module is inert without one; nothing is written here
    spec = importlib.util.spec_from_file_location("hs_dump", task["dump"])
    hs_dump = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hs_dump)
    from sglang.srt.server_args import prepare_server_args

    answers = {}
    for name, arguments in task["configurations"].items():
        parsed, answer = parse(prepare_server_args, task["model"], arguments)
        if parsed is not None:
            try:
                hs_dump.refuse_wrong_states(hs_dump.Arguments(parsed))
                answer = ["served", ""]
            except hs_dump.DumpRefusedError as error:
                answer = ["hsdump", str(error)]
        answers[name] = answer
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
