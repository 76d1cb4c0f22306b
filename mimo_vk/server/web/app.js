// The page's frame: which model answers, the two views, the key.

import { explained, onKeyNeeded, request, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Decide } from "./decide.js";
import { byId } from "./dom.js";

const RETRY_MILLISECONDS = 1000;

/** Say which model answers, once it is loaded. */
async function meet() {
  const shown = byId("model");
  for (;;) {
    try {
      await request("health");
      const { data } = await (await request("v1/models")).json();
      shown.textContent = data[0].id;
      document.title = `${data[0].id} - mimo-vk`;
      return;
    } catch (error) {
      shown.textContent = error.status === 503 ? "the model is being loaded…" : explained(error);
      if (error.status && error.status !== 503) return;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

/** Ask for the key in a dialog; true once one was given. Who else asks meanwhile waits for the same answer. */
function keyDialog() {
  const dialog = byId("key-dialog");
  let open = null;
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    dialog.close("given");
  });
  byId("key-cancel").addEventListener("click", () => dialog.close(""));
  return (message) => {
    open ??= new Promise((resolve) => {
      byId("key-message").textContent = message;
      dialog.returnValue = "";
      dialog.addEventListener("close", () => {
        byId("key").value = "";
        open = null;
        resolve(dialog.returnValue === "given");
      }, { once: true });
      dialog.showModal();
    });
    return open;
  };
}

/** Tabs as keyboards expect them: one stop, arrows between them. */
function tabs() {
  const all = [...document.querySelectorAll("[role=tab]")];
  const select = (chosen) => {
    for (const tab of all) {
      tab.setAttribute("aria-selected", tab === chosen);
      tab.tabIndex = tab === chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
  };
  all.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = all[(i + step + all.length) % all.length];
      select(next);
      next.focus();
    });
  });
}

onKeyNeeded(keyDialog());
tabs();
const chat = new Chat();
new Decide((assets) => chat.texts(assets));
byId("message").focus();
meet();
