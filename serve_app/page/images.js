// Images for the next message: chosen, pasted or dropped, and sent inside of it as data URLs.

import { byId, make } from "./elements.js";

const FORMATS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

let attached = []; // data URLs
let isWanted = false; // whether the model takes images

export function setTakesImages(takesImages) {
  isWanted = takesImages;
  byId("attach").hidden = !takesImages;
}

export const hasImages = () => attached.length > 0;

export function takeImages() {
  const urls = attached;
  attached = [];
  showImages();
  return urls;
}

function showImages() {
  const shelf = byId("attachments");
  shelf.hidden = attached.length === 0;
  shelf.replaceChildren(...attached.map((url, index) => preview(url, index)));
}

function preview(url, index) {
  const name = `image ${index + 1}`;
  const remove = make("button", { type: "button", textContent: "\u00d7", ariaLabel: `Remove ${name}` });
  remove.addEventListener("click", () => {
    attached.splice(index, 1);
    showImages();
    byId("prompt").focus(); // the button that had it is gone
  });
  return make("figure", {}, make("img", { src: url, alt: name }), remove);
}

function readImage(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  const say = (text) => (byId("attach-note").textContent = text);
  say("");
  const images = [...files].filter((file) => FORMATS.includes(file.type));
  if (!files.length) return;
  if (!isWanted) return say("This model takes no images.");
  if (images.length < files.length) say("Only PNG, JPEG, WebP, GIF and BMP images can be attached.");
  try {
    attached.push(...(await Promise.all(images.map(readImage))));
  } catch (error) {
    say(`The file could not be read: ${error.message}`);
  }
  showImages();
}

byId("images").accept = FORMATS.join();
byId("images").addEventListener("change", (event) => {
  attach(event.target.files);
  event.target.value = "";
});
document.addEventListener("paste", (event) => attach(event.clipboardData.files));
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // else the browser would leave the page for the file
    if (name === "drop") attach(event.dataTransfer.files);
  });
}
