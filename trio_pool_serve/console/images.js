// Images that are dropped on the page, pasted or chosen; they stay in the page as data: URLs.

import { h } from "./elements.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_IMAGES = 16;

export class ImageDrop {
  names = [];
  urls = [];

  constructor() {
    this.thumbs = h("div", { class: "thumbs" });
    this.note = h("p", { class: "hint", role: "status" });
    const chooser = h("input", { type: "file", accept: KINDS.join(), multiple: true, "aria-label": "Images", onchange: () => this.add(chooser.files) });
    this.element = h("div", { class: "drop" },
      h("span", { class: "hint" }, "Images: drop them here, paste them or choose files."), chooser, this.thumbs, this.note);
    for (const [kind, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      this.element.addEventListener(kind, (event) => {
        event.preventDefault();
        this.element.classList.toggle("over", isOver);
        if (kind === "drop") this.add(event.dataTransfer.files);
      });
    }
  }

  /** Add images that are pasted anywhere in `target`; returns what ends that. */
  acceptPasted(target) {
    const listener = (event) => event.clipboardData.files.length && this.add(event.clipboardData.files);
    target.addEventListener("paste", listener);
    return () => target.removeEventListener("paste", listener);
  }

  async add(files) {
    const accepted = [...files].filter((file) => KINDS.includes(file.type)).slice(0, MAX_IMAGES - this.urls.length);
    for (const file of accepted) {
      this.urls.push(await dataUrl(file));
      this.names.push(file.name || "pasted image");
    }
    const left = files.length - accepted.length;
    this.note.textContent = left ? `${left} left out: PNG, JPEG, WebP, GIF and BMP are accepted, ${MAX_IMAGES} at most.` : "";
    this.#draw();
  }

  #draw() {
    this.thumbs.replaceChildren(...this.urls.map((url, at) => h("span", { class: "thumb" }, h("img", { src: url, alt: this.names[at] }),
      h("button", { type: "button", "aria-label": `Remove ${this.names[at]}`, onclick: () => this.#remove(at) }, "Remove"))));
  }

  #remove(at) {
    this.urls.splice(at, 1);
    this.names.splice(at, 1);
    this.#draw();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
