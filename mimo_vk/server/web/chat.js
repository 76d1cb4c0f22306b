// The conversation: what was said, the answer as it comes, and what is about to be sent.

import { events, explained } from "./api.js";
import { announce, byId, make, tell } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { Pictures } from "./pictures.js";

/** The chat view. ``messages`` are the turns so far, in the API's form. */
export class Chat {
  constructor() {
    this.messages = [];
    this.running = null; // an AbortController while an answer comes
    this.input = byId("message");
    this.log = byId("turns");
    this.pictures = new Pictures((text) => tell(byId("chat-error"), text));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("options-button").addEventListener("click", () => toggle(byId("options-button"), byId("options")));
  }

  /** The turns as System One takes them: roles and texts, a placeholder for each picture, which ``assets`` then has. */
  texts(assets) {
    return this.messages.map(({ role, content }) => ({ role, content: textOf(content, (uri) => placed(uri, assets)) }));
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    tell(byId("chat-error"), "");
    announce("new chat");
    this.input.focus();
  }

  async send() {
    const text = this.input.value.trim();
    if (this.running || (!text && !this.pictures.uris.length)) return;
    const turn = { role: "user", content: this.pictures.content(text) };
    const messages = this.messages;
    const question = asked(turn.content);
    const answer = new AnswerView((change) => this.follow(change));
    this.log.querySelector("#welcome")?.remove();
    this.log.append(question, answer.element);
    this.setRunning(new AbortController());
    this.input.value = "";
    const sent = this.pictures.take();
    this.log.scrollTop = this.log.scrollHeight;
    const error = await this.receive([...messages, turn], answer);
    answer.finish();
    this.setRunning(null);
    if (messages !== this.messages) return; // a new chat was begun meanwhile
    if (answer.isKept()) {
      messages.push(turn, answer.message());
    } else {
      question.remove();
      answer.element.remove();
      if (!this.input.value) this.input.value = text; // to be sent again
      this.pictures.give(sent);
    }
    tell(byId("chat-error"), error);
    announce(error || (answer.reason === "stopped" ? "stopped" : "the answer is complete"));
  }

  /** Read an answer into its view; returns what went wrong, or "". */
  async receive(messages, answer) {
    const { signal } = this.running;
    try {
      for await (const event of events("v1/chat/completions", requestBody(messages), signal)) {
        answer.add(event);
      }
      return "";
    } catch (error) {
      if (signal.aborted) {
        answer.reason = "stopped";
        return "";
      }
      answer.reason = "broken";
      return explained(error);
    }
  }

  /** Change what is shown and stay at its end; whoever scrolled up reads on there. */
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  setRunning(controller) {
    this.running = controller;
    byId("stop").hidden = controller === null;
    byId("send").hidden = controller !== null;
    tell(byId("chat-error"), "");
    if (controller === null && document.activeElement === document.body) this.input.focus();
  }
}

function requestBody(messages) {
  const system = byId("system").value.trim();
  const temperature = byId("temperature").value;
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    enable_thinking: byId("think").checked,
    stream_options: { include_usage: true },
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
  };
}

function toggle(button, element) {
  element.hidden = !element.hidden;
  button.setAttribute("aria-expanded", !element.hidden);
}

function textOf(content, ofPicture = () => "") {
  if (typeof content === "string") return content;
  return content.map((part) => part.text ?? ofPicture(part.image_url.url)).join("");
}

/** A name for a picture that no one else writes. */
function placed(uri, assets) {
  const name = `[picture ${Object.keys(assets).length + 1} ${Math.random().toString(36).slice(2)}]`;
  const [, format, data] = /^data:image\/([^;,]*)[^,]*,(.*)$/s.exec(uri);
  assets[name] = { type: "image", format, data_base64: data };
  return name;
}

/** A person's turn: as it was typed, with its pictures. */
function asked(content) {
  const images = typeof content === "string" ? [] : content.filter((part) => part.type === "image_url");
  return make("article", { className: "turn user", "aria-label": "You" },
    ...images.map((part, i) => make("img", { src: part.image_url.url, alt: `picture ${i + 1}` })),
    make("p", { className: "typed" }, textOf(content)));
}

/** An answer that is coming: its thinking folded, its text as Markdown, its figures. ``follow`` makes its changes. */
class AnswerView {
  constructor(follow) {
    this.follow = follow;
    this.content = "";
    this.reasoning = "";
    this.reason = "";
    this.usage = null;
    this.began = performance.now();
    this.firstAt = 0;
    this.frame = 0;
    this.summary = make("summary", {}, "Thinking…");
    this.thoughts = make("div", { className: "thoughts" });
    this.thinking = make("details", { hidden: true }, this.summary, this.thoughts);
    this.text = make("div", { className: "text" });
    this.note = make("p", { className: "note" }, "waiting…");
    this.markdown = new MarkdownView(this.text);
    this.element = make("article", { className: "turn assistant", "aria-label": "The model", "aria-busy": "true" },
      this.thinking, this.text, this.note);
  }

  /** One object of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      this.reasoning += choice.delta.reasoning_content ?? "";
      this.content += choice.delta.content ?? "";
      this.reason = choice.finish_reason ?? this.reason;
    }
    if (!this.firstAt && (this.content || this.reasoning)) this.firstAt = performance.now();
    this.frame ||= requestAnimationFrame(() => this.follow(() => this.draw()));
  }

  draw() {
    this.frame = 0;
    this.thinking.hidden = !this.reasoning;
    this.summary.textContent = this.content || this.reason ? "Thought" : "Thinking…";
    this.thoughts.textContent = this.reasoning;
    this.markdown.show(this.content);
    if (this.content || this.reasoning) this.note.textContent = "";
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.follow(() => {
      this.draw();
      this.note.textContent = this.figures();
      if (this.content) this.element.append(copyButton(() => this.content));
    });
    this.element.setAttribute("aria-busy", "false");
  }

  /** Whether it becomes part of the conversation. */
  isKept() {
    return Boolean(this.content || this.reasoning) || this.reason === "stop";
  }

  message() {
    const message = { role: "assistant", content: this.content };
    return this.reasoning ? { ...message, reasoning_content: this.reasoning } : message;
  }

  figures() {
    const said = { stopped: "stopped", broken: "broken off", length: "the context is full: begin a new chat" };
    const parts = said[this.reason] ? [said[this.reason]] : [];
    if (this.usage) {
      const { prompt_tokens: read, completion_tokens: made, prompt_tokens_details: details } = this.usage;
      const seconds = (performance.now() - this.firstAt) / 1000;
      parts.push(`${read} tokens read (${details.cached_tokens} of them known)`, `${made} written`);
      parts.push(`first after ${((this.firstAt - this.began) / 1000).toFixed(1)} s`);
      if (made > 1 && seconds > 0) parts.push(`then ${((made - 1) / seconds).toFixed(1)} a second`);
    }
    return parts.join(", ");
  }
}

function copyButton(text) {
  const button = make("button", { type: "button", className: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Can't copy here";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}
