"""Made-up prompts of clients that are known to break the beginning of their own prompts, in the
chat templates of well-known models: what was stored, what is asked for then, and what is to be
said.
"""

from __future__ import annotations

from dataclasses import dataclass


def chatml(*turns: tuple[str, str]) -> str:
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def llama3(*turns: tuple[str, str]) -> str:
    said = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>" for role, text in turns
    )
    return f"<|begin_of_text|>{said}<|start_header_id|>assistant<|end_header_id|>\n\n"


def gemma(*turns: tuple[str, str]) -> str:
    said = "".join(f"<start_of_turn>{role}\n{text}<end_of_turn>\n" for role, text in turns)
    return f"<bos>{said}<start_of_turn>model\n"


def mistral(tools: str, *turns: tuple[str, str]) -> str:
    said = f"[AVAILABLE_TOOLS]{tools}[/AVAILABLE_TOOLS]" if tools else ""
    for question, answer in turns:
        said += f"[INST] {question}[/INST]" + (f" {answer}</s>" if answer else "")
    return f"<s>{said}"


def deepseek(system: str, *turns: tuple[str, str]) -> str:
    said = f"<\uff5cbegin\u2581of\u2581sentence\uff5c>{system}"
    for question, answer in turns:
        said += f"<\uff5cUser\uff5c>{question}<\uff5cAssistant\uff5c>"
        said += f"{answer}<\uff5cend\u2581of\u2581sentence\uff5c>" if answer else ""
    return said


@dataclass(frozen=True)
class Case:
    """`stored` is in the store, with its answer; then `asked` comes. `shown` are pieces of the two
    sides' text, stored first; `part` and `turn` where it lies; `cure` a piece of the cure.
    """

    name: str
    stored: str
    asked: str
    verdict: str
    part: str
    turn: int | None
    shown: tuple[str, str]
    cure: str
    what: str = ""


RULES = " ".join(f"Rule {n}: be polite, and answer in one sentence." for n in range(12))
LIGHTS = " ".join(f"- names: lamp {n} domain: light state: 'off'" for n in range(12))
LINES = "".join(f"Line {n} of a long document. " for n in range(40))
STORY = "Once there was a king who had three daughters, and none of them could tell a lie. "


def tool(name: str, *keys: str) -> str:
    said = ", ".join(f'"{key}": {{"type": "string"}}' for key in keys)
    return (
        f'{{"type": "function", "function": {{"name": "{name}", "description": "Does {name}.", '
        f'"parameters": {{"type": "object", "properties": {{{said}}}}}}}}}'
    )


def _claude(cch: str) -> str:
    header = f"x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={cch};"
    system = f"{header}\nYou are Claude Code, a command line tool. {RULES}"
    return chatml(("system", system), ("user", "Fix the test."))


def _home(time: str) -> str:
    system = (
        f"Current time is {time}. Today's date is 2026-11-27.\nYou are a voice assistant for Home "
        f"Assistant.\n{RULES}\n{LIGHTS}"
    )
    return llama3(("system", system), ("user", "Turn on the light."))


def _title(chat: str) -> str:
    task = (
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."
    )
    return chatml(("user", f"{task}\n{RULES}\n<chat_history>\n{chat}\n</chat_history>"))


SEARCH = chatml(("system", "Be brief."), ("user", "Hello there, who are you?"))
RAG = (
    "### Task:\nRespond to the user query using the provided context.\n<context>\n<source id=1>"
    f"{STORY * 3}</source>\n</context>\n"
)
AGENT = "You are a coding agent. Current date: {date}. Working directory: /home/me/shop. {rules}"
HERMES = "You are Hermes. MEMORY (your personal notes) [{meter} chars]\n{rules}"
ANSWER = STORY * 6
CALL = '<tool_call>\n{{"name": "get_weather", "arguments": {{{arguments}}}}}\n</tool_call>'
KEYS = '"city": "Paris", "days": "3"', '"days": "3", "city": "Paris"'
QUESTIONS = [
    (f"Question {n}: what is in room {n}?", f"Answer {n}: {STORY}{n} chairs.") for n in range(8)
]


def _chat(first: int, last: int) -> str:
    turns = [(role, text) for pair in QUESTIONS[first:last] for role, text in _pair(pair)]
    return chatml(("system", RULES[:200]), *turns, ("user", QUESTIONS[last][0]))


def _pair(pair: tuple[str, str]) -> list[tuple[str, str]]:
    return [("user", pair[0]), ("assistant", pair[1])]


CASES = [
    Case(
        *("Claude Code's attribution header", _claude("36ee5"), _claude("0aaa9")),
        *("value", "system", None, ("cch=⟪36ee5⟫;", "cch=⟪0aaa9⟫;")),
        *("CLAUDE_CODE_ATTRIBUTION_HEADER=0", "an id that changes, in the system prompt"),
    ),
    Case(
        *("Home Assistant's clock", _home("20:37:19"), _home("21:04:33")),
        *("value", "system", None, ("time is 2⟪0:37:19⟫. Today", "time is 2⟪1:04:33⟫. Today")),
        *("GetDateTime", "a time that changes, in the system prompt"),
    ),
    Case(
        *("Open WebUI's titles", _title("USER: Hi\nASSISTANT: Hi"), _title("USER: Why? " * 30)),
        *("other_prompt", "user", 1, ("USER: ⟪Hi", "USER: ⟪Why?")),
        *("Task Model", "another prompt that begins alike"),
    ),
    Case(
        "Open WebUI's documents in the last message",
        chatml(("system", RULES), ("user", RAG + "Who lies?")) + f"{ANSWER}<|im_end|>\n",
        chatml(("system", RULES), ("user", "Who lies?"), ("assistant", ANSWER), ("user", "Why?")),
        *("rewritten_history", "user", 1, ("user⏎⟪### Task:", "user⏎⟪⟫Who lies?")),
        *("RAG_SYSTEM_CONTEXT", "some text is not in that message any more"),
    ),
    Case(
        "an agent's date",
        gemma(("user", AGENT.format(date="2026-11-26", rules=RULES) + "\n\nHello.")),
        gemma(("user", AGENT.format(date="2026-11-27", rules=RULES) + "\n\nHello.")),
        *("value", "user", 1, ("2026-11-2⟪6⟫. Working", "2026-11-2⟪7⟫. Working")),
        *("behind all that stays the same", "a date that changes"),
    ),
    Case(
        "an agent's working directory",
        deepseek(AGENT.format(date="2026-11-26", rules=RULES), ("Hello.", "")),
        deepseek(
            AGENT.format(date="2026-11-26", rules=RULES).replace("/me/shop", "/me/work/site"),
            ("Hello.", ""),
        ),
        *("value", "system", None, ("/home/me/⟪shop⟫. Rule", "/home/me/⟪work/site⟫. Rule")),
        *("out of the system prompt", "a path that changes, in the system prompt"),
    ),
    Case(
        "hermes-agent's meter",
        chatml(("system", HERMES.format(meter="49% — 1,085/2,200", rules=RULES)), ("user", "Hi.")),
        chatml(("system", HERMES.format(meter="50% — 1,102/2,200", rules=RULES)), ("user", "Hi.")),
        *("value", "system", None, ("[⟪49% — 1,085⟫/2", "[⟪50% — 1,102⟫/2")),
        *("meter of its memory", "a counter that changes, in the system prompt"),
    ),
    Case(
        "tools in another order",
        mistral(", ".join([tool("read", "path"), tool("write", "path", "text")]), (RULES, "")),
        mistral(", ".join([tool("write", "path", "text"), tool("read", "path")]), (RULES, "")),
        *("order", "tools", None, ('"name": "⟪read', '"name": "⟪write')),
        *("in one order", "the tools: the same in another order"),
    ),
    Case(
        "keys of a tool in another order",
        chatml(("system", f"{RULES}\n# Tools\n{tool('walk', 'to', 'speed')}"), ("user", ANSWER)),
        chatml(("system", f"{RULES}\n# Tools\n{tool('walk', 'speed', 'to')}"), ("user", ANSWER)),
        *("order", "tools", None, ('{"⟪to', '{"⟪speed')),
        *("in one order", "the tools: the same in another order"),
    ),
    Case(
        "a template that drops old reasoning",
        chatml(("system", RULES), ("user", "Why?"))
        + f"<think>\nThe user wants to know why. Let me think.\n</think>\n\n{ANSWER}<|im_end|>\n",
        chatml(("system", RULES), ("user", "Why?"), ("assistant", ANSWER), ("user", "And then?")),
        *("rewritten_history", "assistant", 1, ("⟪<think>", "assistant⏎⟪⟫Once")),
        *("drops old reasoning", "the reasoning of an earlier answer"),
    ),
    Case(
        "LangChain's tool calls in another order",
        chatml(("system", RULES), ("user", "Weather?"))
        + f"{CALL.format(arguments=KEYS[0])}<|im_end|>\n<|im_start|>tool\n{ANSWER}<|im_end|>\n",
        chatml(
            *(("system", RULES), ("user", "Weather?")),
            *(("assistant", CALL.format(arguments=KEYS[1])), ("tool", ANSWER)),
        ),
        *("rewritten_history", "assistant", 1, ('{"⟪city', '{"⟪days')),
        *("exactly as it got them", "a tool call is not written as the model wrote it"),
    ),
    Case(
        *("a chat that outgrew num_ctx", _chat(0, 5), _chat(2, 6)),
        *("cut_prompt", "user", 1, ("Question ⟪0", "Question ⟪⟫2")),
        *("Raise num_ctx", "Ollama cut the prompt"),
    ),
    Case(
        *(
            "one message that is longer than num_ctx",
            f"<s>{LINES}",
            f"<s>Line 0{LINES[LINES.index('11 of') :]}",
        ),
        *("cut_prompt", "", None, ("<s>Line 0⟪ of a long", "<s>Line 0⟪⟫11 of")),
        *("Raise num_ctx", "Ollama cut the prompt"),
    ),
    Case(
        "SillyTavern's lore",
        chatml(
            ("system", f"You are Mira. {STORY}[Lore: the moon is red.] {RULES}"), ("user", "Hi")
        ),
        chatml(("system", f"You are Mira. {STORY}[Lore: dogs can talk.] {RULES}"), ("user", "Hi")),
        *("changed_text", "system", None, ("⟪the moon is red⟫", "⟪dogs can talk⟫")),
        *("", "a text that changed, in the system prompt"),
    ),
]

# Stored, and asked for afterwards: nothing is wrong.
SOUND = {
    "a following turn": (_chat(0, 3) + QUESTIONS[3][1] + "<|im_end|>\n", _chat(0, 4)),
    "the same again": (_chat(0, 3), _chat(0, 3)),
    "another answer to the same": (_chat(0, 3) + QUESTIONS[3][1], _chat(0, 3)),
    "another question to the same system prompt": (
        _chat(0, 0),
        SEARCH.replace("Be brief.", RULES[:200]),
    ),
    "the last question again, put otherwise": (
        _chat(0, 3),
        _chat(0, 3).replace("in room 3", "on it"),
    ),
    "a first prompt": ("Quite another thing. " * 9, _chat(0, 3)),
}
