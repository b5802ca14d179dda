"""A process of its own, in which grammars are tried before the engine compiles them: reads questions from stdin, answers on stdout.

Compiling may take minutes or overflow the stack, and nothing inside the process could stop that. This one is simply killed (`grammar.py`).
One line of JSON each way: {"kind", "text", "compact"} -> {"grammar"}, what the matcher is made of, or {"error"}.
Run as a file: it imports llguidance and nothing of Headway.
"""

import json
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, grammar_from

# Less than a thread of the engine has: what passes here fits there.
STACK_BYTES = 2 << 20


def main() -> None:
    limits = LLParserLimits(**json.loads(sys.stdin.readline()))
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin:
        answers: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda question, found: found.append(answer(question, limits)), args=(json.loads(line), answers))
        thread.start()
        thread.join()
        print(json.dumps(answers[0] if answers else {"error": "it cannot be compiled"}), flush=True)


def answer(question: dict[str, str], limits: LLParserLimits) -> dict[str, str]:
    try:
        grammar = translated(question)
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    return {"error": messages[0]} if is_wrong else {"grammar": grammar}


def translated(question: dict[str, str]) -> str:
    """In llguidance's own form."""
    kind, text = question["kind"], question["text"]
    if kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": not question["compact"]})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        # In capitals: one word of the grammar, not as many rules.
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
    return grammar_from("grammar", text)


if __name__ == "__main__":
    main()
