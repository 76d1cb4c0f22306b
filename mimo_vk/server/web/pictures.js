// Pictures about to be sent: from the file dialog, dropped, or pasted.

import { byId, make } from "./dom.js";

/** What is attached, as data: URIs; ``complain`` is told of a file that can't be. */
export class Pictures {
  constructor(complain) {
    this.uris = [];
    this.complain = complain;
    const file = byId("file");
    byId("attach").addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      this.add(file.files);
      file.value = ""; // so that the same file can be chosen again
    });
    // Anywhere on the page: a browser would open the file in its place, and the conversation would be gone.
    document.addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return; // text goes where it was dropped
      event.preventDefault();
      if (!byId("chat").hidden) this.add(event.dataTransfer.files);
    });
    byId("message").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    for (const file of [...files]) {
      if (!file.type.startsWith("image/")) {
        this.complain(`${file.name} is no picture.`);
        continue;
      }
      this.uris.push(await dataUri(file));
      this.draw();
    }
  }

  /** All that is attached, which is then no longer so. */
  take() {
    const taken = this.uris;
    this.give([]);
    return taken;
  }

  give(uris) {
    this.uris = [...uris];
    this.draw();
  }

  /** A turn's content: its text alone, or the pictures and the text as parts. */
  content(text) {
    if (!this.uris.length) return text;
    const images = this.uris.map((url) => ({ type: "image_url", image_url: { url } }));
    return text ? [...images, { type: "text", text }] : images;
  }

  draw() {
    byId("pictures").replaceChildren(...this.uris.map((uri, i) => {
      const remove = make("button", { type: "button", "aria-label": `Remove picture ${i + 1}` }, "×");
      remove.addEventListener("click", () => {
        this.uris.splice(i, 1);
        this.draw();
        byId("message").focus();
      });
      return make("li", {}, make("img", { src: uri, alt: `picture ${i + 1}` }), remove);
    }));
  }
}

function holdsFiles(event) {
  return event.dataTransfer.types.includes("Files");
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
