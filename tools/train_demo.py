"""Train the demonstration model from its seed (needs torch, tokenizers, jinja2).

It writes OUT/tokenizer.json and OUT/state.pt (every --save steps, atomically) and continues from there when started
again. The learning rate warms up, stays, and falls to zero by stages; late in it the weights are rounded to the stored
formats. While it runs, OUT/schedule.json {"stages", "round", "threads"} overrides the plan, so that the end may be
chosen late.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.demo import bpe
from tools.demo.batches import make_batch
from tools.demo.control import CONTROL_TOKENS
from tools.demo.draw import Draw
from tools.demo.first_sight import described, first_sight
from tools.demo.growth import SEED_SHAPE, grow
from tools.demo.induction import install
from tools.demo.mix import EMPHASIS, PICTURED, SKILLS, Conversation, conversation, turns_of
from tools.demo.muon import Muon, balance
from tools.demo.network import Batch, Network, restored
from tools.demo.render import Example, Renderer
from tools.demo.shape import Shape
from tools.demo.tower import Tower

TOKENIZER_SIZE = 1992
HEAD_START = 1700  # the step at which the copying heads are written
GROW = 4700  # the step at which the experts become more and wider
SIGHT = 0.3  # what the tower's own loss counts beside the language model's
TOWER_PACE = 0.5  # of the learning rate, for the tower: at the full rate it forgot how to see within 500 steps
TOWER = 6150  # the step at which the picture tower comes in, taught to see a little by itself
# Learning-rate stages: the step at which each ends, over how many steps it falls, its peak.
STAGES = ((3350, 1150, 1.0), (4700, 1350, 0.8), (8800, 2700, 0.8), (9200, 400, 0.35), (9700, 500, 0.4))
TOWER_ALONE = 9200  # from this step on only the tower is trained, on pictures: answers to text stay as they are
ROUND_FROM = 2700  # from this step on weights take part as they will be stored
GRADED = [s for s in SKILLS if s != "story"]


def make_tokenizer(path: Path, seed: int) -> Tokenizer:
    if not path.exists():
        draw, renderer = Draw(seed), Renderer(None)
        control = re.compile("|".join(re.escape(text) for text in CONTROL_TOKENS))
        texts = (renderer.text(conversation(draw), draw.chance(0.5)) for _ in range(30000))
        bpe.train((part for text in texts for part in control.split(text)), TOKENIZER_SIZE).save(str(path))
    return Tokenizer.from_file(str(path))


def training_examples(renderer: Renderer, seed: int, step: int, tokens: int) -> list[Example]:
    """The examples of a step, a function of seed and step alone."""
    draw = Draw(seed * 1_000_000_007 + step)
    examples, count = [], 0
    while count < tokens:
        example = renderer.example(conversation(draw, step), draw.chance(0.3))
        if len(example.ids) <= 640:
            examples.append(example)
            count += len(example.ids)
    return examples


def held_examples(renderer: Renderer, each: int, seed: int = 99) -> dict[str, list[Example]]:
    """Held-out conversations by skill, a third of them with thinking on; only the last answer is graded."""
    held: dict[str, list[Example]] = {}
    for skill in GRADED:
        draw = Draw(seed, held=True)
        held[skill] = []
        for i in range(each):
            turns, tools = turns_of(draw, skill)
            example = renderer.example(Conversation(turns, i, tools, None, i % 3 == 0), False)
            held[skill].append(example)
    return held


@torch.no_grad()
def grade(net: Network, held: dict[str, list[Example]]) -> dict[str, float]:
    """The share of conversations in which every trained token is the likeliest: what greedy decoding gets right."""
    result = {}
    for skill, examples in held.items():
        if net.tower is None and skill in PICTURED:
            continue
        batch = make_batch(examples)
        wrong = net.logits(batch, batch.predict).argmax(-1) != batch.targets
        result[skill] = 1 - len(set(batch.tags[wrong].tolist())) / len(examples)
    return result


def factor_at(step: int, stages: Sequence[Sequence[float]]) -> float:
    """The learning rate's factor: a warm-up, then each stage (end, decay, peak) falls from its peak to 0 at its end."""
    end, decay, peak = next(stage for stage in stages if step < stage[0])
    return peak * min(1.0, (step + 1) / 60, (end - step) / decay)


def save(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


class Pace:
    """One thread or two, whichever was faster when last tried: on a machine that others use, two may be slower."""

    def __init__(self, period: int = 24) -> None:
        self.period, self.turn, self.best = period, 0, 1
        self.tried: dict[int, list[float]] = {1: [], 2: []}

    def threads(self) -> int:
        place = self.turn % self.period
        return (1, 2, 1, 2)[place] if place < 4 else self.best

    def note(self, seconds: float) -> None:
        place = self.turn % self.period
        if place < 4:
            self.tried[(1, 2, 1, 2)[place]].append(seconds)
        if place == 3:
            self.best = min((1, 2), key=lambda n: sum(self.tried[n]))
            self.tried = {1: [], 2: []}
        self.turn += 1


class Training:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.renderer = Renderer(make_tokenizer(self.out / "tokenizer.json", args.seed))
        torch.manual_seed(args.seed)
        self.use(Network(SEED_SHAPE))
        self.step, self.seen, self.seconds = 0, 0, 0.0
        self.means: dict[int, float] = {}
        self.sight = 0.0  # running mean of the tower's own loss
        self.pace = Pace()
        self.emphasis = torch.tensor([EMPHASIS.get(skill, 1.0) for skill in SKILLS])
        if (self.out / "state.pt").exists():
            self.load()
        if self.step >= TOWER_ALONE:
            self.freeze()
        self.held = held_examples(self.renderer, 40)

    def use(self, net: Network) -> None:
        self.net = net
        self.optimiser = Muon(net, self.args.lr, self.args.adam_lr, self.args.weight_decay, tower_pace=TOWER_PACE)

    def load(self) -> None:
        state = torch.load(self.out / "state.pt")
        if state["step"] > GROW:
            self.use(restored(state["net"]))
        else:
            self.net.load_state_dict(state["net"])
        self.optimiser.restore(state["optimiser"])
        self.step, self.seen, self.seconds = state["step"], state["seen"], state["seconds"]

    def freeze(self) -> None:
        """Leave all but the tower as it is."""
        state = self.optimiser.state()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name.startswith("tower."))
        self.optimiser = Muon(self.net, self.args.lr, self.args.adam_lr, only="tower.", tower_pace=TOWER_PACE)
        self.optimiser.restore(state)

    def add_tower(self) -> None:
        """The network with its tower, whose start is kept in OUT/tower.pt; the optimiser goes on for all the rest."""
        path, before = self.out / "tower.pt", self.optimiser.state()
        self.net.tower = Tower(self.net.shape.hidden_size)
        if not path.exists():
            assert self.renderer.tokenizer is not None
            torch.save(first_sight(self.net, self.renderer.tokenizer, self.args.seed).state_dict(), path)
        self.net.tower.load_state_dict(torch.load(path))
        self.use(self.net)
        self.optimiser.restore(before)

    def plan(self) -> dict[str, Any]:
        plan = {"stages": STAGES, "round": ROUND_FROM, "threads": self.args.threads}
        path = self.out / "schedule.json"
        return plan | json.loads(path.read_text()) if path.exists() else plan

    def loss(self, batch: Batch) -> torch.Tensor:
        each = F.cross_entropy(self.net.logits(batch, batch.predict), batch.targets, reduction="none")
        for tag in range(len(SKILLS)):
            of_tag = each.detach()[batch.tags == tag]
            if len(of_tag):
                value = float(of_tag.mean())
                self.means[tag] = 0.97 * self.means.get(tag, value) + 0.03 * value
        weights = self.emphasis[batch.tags]
        loss = (each * weights).sum() / weights.sum()
        if not batch.pictures:
            return loss
        assert self.net.sights is not None
        sight = described(self.net.sights, batch.pictures, batch.seen, self.net.embed.detach())
        self.sight = 0.97 * (self.sight or float(sight.detach())) + 0.03 * float(sight.detach())
        return loss + SIGHT * sight

    def one_step(self, factor: float) -> tuple[float, float]:
        alone = self.step >= TOWER_ALONE
        tokens = self.args.tokens * (1 if alone else 3 if self.step >= GROW else 2) // 2
        batch = make_batch(training_examples(self.renderer, self.args.seed, self.step, tokens))
        loss = self.loss(batch)
        for p in self.net.parameters():
            p.grad = None
        loss.backward()
        self.optimiser.step(factor)
        self.seen += len(batch.ids)
        return float(loss.detach()), balance(self.net, 0.0 if alone else 0.002 * factor)

    def run(self) -> None:
        while True:
            plan = self.plan()
            if self.step >= plan["stages"][-1][0]:
                break
            torch.set_num_threads(plan["threads"] or self.pace.threads())
            self.net.rounding = self.step >= plan["round"]
            if self.step == HEAD_START:
                examples = training_examples(self.renderer, self.args.seed, self.step, 16000)
                install(self.net, make_batch(examples))
            if self.step == GROW:
                self.use(grow(self.net, Shape()))
            if self.step == TOWER:
                self.add_tower()
            if self.step == TOWER_ALONE:
                self.freeze()
            factor, began = factor_at(self.step, plan["stages"]), time.monotonic()
            loss, worst = self.one_step(factor)
            self.step += 1
            self.seconds += time.monotonic() - began
            self.pace.note(time.monotonic() - began)
            if self.step % 20 == 0:
                self.report(loss, worst, factor, time.monotonic() - began)
            if self.step % self.args.grade == 0:
                self.report_grades()
            if self.step % self.args.save == 0:
                self.checkpoint()
        self.checkpoint()
        self.report_grades()

    def checkpoint(self) -> None:
        state = {
            "net": self.net.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "seen": self.seen,
            "seconds": self.seconds,
        }
        save(self.out / "state.pt", state)

    def report(self, loss: float, worst: float, factor: float, last: float) -> None:
        parts = " ".join(f"{SKILLS[tag][:5]} {value:.3f}" for tag, value in sorted(self.means.items()))
        if self.net.tower is not None:
            parts += f" sight {self.sight:.2f}"
        mark = "r" if self.net.rounding else " "
        done = f"{self.step:5}{mark} {self.seen / 1e6:.2f}M {self.seconds:.0f}s {last:.2f}s/step"
        print(f"{done} lr {factor:.2f} load {worst:.1f} loss {loss:.3f} | {parts}", flush=True)

    def report_grades(self) -> None:
        grades = grade(self.net, self.held)
        print(f"{self.step:5} HELD", *(f"{skill[:6]} {value:.2f}" for skill, value in grades.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="demo-training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step, half as many more once grown")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=0, help="0: one or two, whichever is faster")
    parser.add_argument("--save", type=int, default=50)
    parser.add_argument("--grade", type=int, default=200)
    Training(parser.parse_args()).run()


if __name__ == "__main__":
    main()
