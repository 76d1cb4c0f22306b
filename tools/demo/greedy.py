"""The held-out list by greedy decoding in torch, for use while training: python -m tools.demo.greedy DIR [--show N]."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import torch
from tokenizers import Tokenizer

from tools.demo import heldout
from tools.demo.batches import make_batch
from tools.demo.checks import Answer, holds
from tools.demo.control import END, END_THINK, IMAGE, THINK
from tools.demo.network import Network, restored
from tools.demo.patches import patches_of
from tools.demo.pictures import paint
from tools.demo.render import Example, load_template, with_pads

LONGEST = 360


@torch.no_grad()
def decode(net: Network, prompts: list[Example], stop: int) -> list[list[int]]:
    """Greedy continuations, the whole sequences recomputed for each token: slow, but with nothing to go wrong."""
    lines = [list(prompt.ids) for prompt in prompts]
    open_lines = list(range(len(lines)))
    for _ in range(LONGEST):
        open_lines.sort(key=lambda i: len(lines[i]))
        batch = make_batch([replace(prompts[i], ids=lines[i], counts=[False] * len(lines[i])) for i in open_lines])
        ends = torch.tensor([len(lines[i]) for i in open_lines]).cumsum(0) - 1
        for i, token in zip(open_lines, net.logits(batch, ends).argmax(-1).tolist(), strict=True):
            lines[i].append(token)
        open_lines = [i for i in open_lines if lines[i][-1] != stop]
        if not open_lines:
            break
    return [line[len(prompt.ids) :] for line, prompt in zip(lines, prompts, strict=True)]


def prompt_of(entry: dict[str, Any], tokenizer: Tokenizer, template: jinja2.Template) -> Example:
    text = template.render(
        messages=entry["messages"],
        tools=entry.get("tools"),
        add_generation_prompt=True,
        enable_thinking=entry["think"],
    )
    parts = [part for m in entry["messages"] if isinstance(m["content"], list) for part in m["content"]]
    pictures = [patches_of(paint(part["picture"])) for part in parts if "picture" in part]
    encoded = tokenizer.encode(with_pads(text, pictures), add_special_tokens=False)
    return Example(encoded.ids, [], 0, pictures, [i for i, t in enumerate(encoded.tokens) if t == IMAGE])


def parse(text: str, stopped: bool, tools: list[dict[str, Any]] | None) -> Answer:
    """The release's own way of writing: reasoning, content, calls (the engine's parser is more forgiving)."""
    reasoning = ""
    if text.startswith(THINK) and END_THINK in text:
        reasoning, text = text[len(THINK) :].split(END_THINK, 1)
    if not text.startswith("<tool_call>"):
        return Answer(text, reasoning, (), stopped)
    head, *parameters = text.split("<parameter=")
    name = head.split("<function=")[1].split(">")[0]
    properties: dict[str, Any] = {}
    for tool in tools or []:
        if tool["function"]["name"] == name:
            properties = tool["function"]["parameters"]["properties"]
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key, value = parameter.split("</parameter>")[0].split(">", 1)
        arguments[key] = int(value) if properties.get(key, {}).get("type") == "integer" and value.isdigit() else value
    return Answer("", reasoning, ({"name": name, "arguments": arguments},), stopped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path)
    parser.add_argument("--show", type=int, default=20, help="how many wrong answers to print")
    parser.add_argument("--skills", nargs="*", help="only these; default: all but the stories, which are long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.load(args.training / "state.pt")
    net = restored(state["net"])
    net.rounding = True
    tokenizer, template = Tokenizer.from_file(str(args.training / "tokenizer.json")), load_template()
    entries = [e for e in heldout.read() if (e["skill"] in args.skills if args.skills else e["skill"] != "story")]
    stop = tokenizer.token_to_id(END)
    lines = decode(net, [prompt_of(e, tokenizer, template) for e in entries], stop)
    right: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for e, line in zip(entries, lines, strict=True):
        text = tokenizer.decode([i for i in line if i != stop], skip_special_tokens=False)
        total[e["skill"]] += 1
        if holds(e["check"], parse(text, line[-1] == stop, e.get("tools"))):
            right[e["skill"]] += 1
        elif args.show > 0:
            args.show -= 1
            asked = str(e["messages"][-1]["content"])[-180:]
            print(f"{e['skill']} think={e['think']}: {asked!r} -> {text!r}; {e['check']}")
    print(f"step {state['step']}:", ", ".join(f"{skill} {right[skill]}/{count}" for skill, count in total.items()))


if __name__ == "__main__":
    main()
