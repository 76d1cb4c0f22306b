// Closed questions: something to read, a question, a few answers, and how likely each of them is.

import { explained, request } from "./api.js";
import { announce, byId, make, tell } from "./dom.js";

/** The view of System One. ``chatTurns(assets)`` gives the conversation that a question may be about. */
export class Decide {
  constructor(chatTurns) {
    this.chatTurns = chatTurns;
    this.running = null;
    byId("question-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("question-form").addEventListener("change", () => this.draw());
    byId("decide-stop").addEventListener("click", () => this.running?.abort());
    this.draw();
  }

  draw() {
    byId("state-label").hidden = byId("use-chat").checked;
    byId("answers-label").hidden = kind() === "noul";
  }

  async ask() {
    if (this.running) return;
    this.setRunning(new AbortController());
    const began = performance.now();
    let error = "";
    byId("result").replaceChildren();
    try {
      const { signal } = this.running;
      const reply = await (await request("v1/systemone", { body: this.body(), signal })).json();
      byId("result").replaceChildren(...shown(reply, performance.now() - began));
      byId("result").scrollIntoView({ block: "nearest" });
    } catch (caught) {
      error = this.running.signal.aborted ? "Stopped." : explained(caught);
    }
    this.setRunning(null);
    tell(byId("decide-error"), error);
    if (error) announce(error);
  }

  body() {
    const question = { type: kind(), instructions: byId("question").value.trim() || null };
    const answers = byId("answers").value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (question.type === "choice") question.criteria = Object.fromEntries(answers.map((answer) => [answer, null]));
    if (question.type === "score") question.criteria = answers;
    const assets = {};
    const state = byId("use-chat").checked ? this.chatTurns(assets) : byId("state").value;
    return { state, questions: { question }, ...(Object.keys(assets).length ? { assets } : {}) };
  }

  setRunning(controller) {
    this.running = controller;
    byId("decide-stop").hidden = controller === null;
    byId("decide-send").hidden = controller !== null;
    tell(byId("decide-error"), "");
  }
}

function kind() {
  return document.querySelector("input[name=kind]:checked").value;
}

/** The answer's nodes: a bar for each option, most likely first (levels stay in their order), and the figures. */
function shown(reply, milliseconds) {
  const answer = reply.answers.question;
  const rows = rowsOf(answer);
  if (answer.type !== "score") rows.sort((a, b) => b[1] - a[1]);
  const facts = [`${reply.usage.input_tokens} tokens read`, `${(milliseconds / 1000).toFixed(1)} s`];
  if (answer.confidence !== undefined) facts.unshift(`confidence ${percent(answer.confidence)}`);
  if (answer.type === "score") facts.unshift(`expected level ${answer.score.toFixed(2)}`);
  return [make("ul", { className: "bars" }, ...rows.map(bar)), make("p", { className: "note" }, facts.join(", "))];
}

function rowsOf(answer) {
  if (answer.type === "noul") return [["yes", answer.noul], ["no", 1 - answer.noul]];
  const name = (key) => (answer.type === "score" ? `${key}: ${answer.legend[key]}` : key);
  return Object.entries(answer.probabilities).map(([key, share]) => [name(key), share]);
}

function bar([label, share]) {
  const filled = make("span", { className: "filled" });
  filled.style.width = `${100 * share}%`;
  return make("li", {},
    make("span", { className: "label" }, label),
    make("span", { className: "track", "aria-hidden": "true" }, filled),
    make("span", { className: "share" }, percent(share)));
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}
