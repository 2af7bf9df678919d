// A matrix of numbers as coloured cells on a canvas, used by mouse and by keyboard.

import { colour, format, h } from "./elements.js";

// Viridis at nine places (matplotlib, CC0): its lightness rises evenly, so that it is read without colours too.
const SCALE = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
const NAN = [128, 128, 128];
const PHONE = matchMedia("(max-width: 600px)");
const PHONE_MARGINS = 72;  // of the page and of the card around a map, in pixels
const MAX_CELLS = 40_000;

// Names are in the colour of texts.
document.addEventListener("themechange", () => document.querySelectorAll("canvas").forEach((canvas) => canvas.redraw?.()));

export function colourAt(share) {
  if (!Number.isFinite(share)) return NAN;
  const at = Math.min(1, Math.max(0, share)) * (SCALE.length - 1);
  const low = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[low].map((from, channel) => Math.round(from + (SCALE[low + 1][channel] - from) * (at - low)));
}

const brightness = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue;

/**
 * Return `{element, draw}`. `values` are rows of numbers; `names` are those of the rows and of the columns. `onpick(row,
 * column)` is called for the cell under the mouse or the keyboard's cursor.
 */
export function heatmap(title, values, [rowNames, columnNames], { low, high, onpick, cell = 52, verticalNames = false } = {}) {
  const [height, width] = [values.length, values[0]?.length ?? 0];
  if (height * width > MAX_CELLS) return { element: h("p", {}, `${title}: ${height} × ${width} cells are too many to draw; export them instead.`) };
  const flat = values.flat().filter(Number.isFinite);
  const least = low ?? flat.reduce((a, b) => Math.min(a, b), Infinity);
  const most = high ?? flat.reduce((a, b) => Math.max(a, b), -Infinity);
  // On a phone, names are short and cells large enough for a finger: a map that is wider scrolls in its box.
  const [maxName, leastSize] = PHONE.matches ? [110, 24] : [190, 8];
  const sizeIn = (room) => Math.max(leastSize, Math.min(cell, Math.floor(room / Math.max(1, width)), Math.floor(700 / Math.max(1, height))));
  const font = `${sizeIn(900) < 20 ? 9 : 12}px system-ui`;
  // Names of rows stand on the left; those of columns above, upright, or as the numbers of rows with the same names.
  const left = Math.min(maxName, widest(rowNames.map((name, at) => label(name, at)), font)) + 8;
  const top = verticalNames ? Math.min(maxName, widest(columnNames, font)) + 8 : 18;
  const size = sizeIn(PHONE.matches ? innerWidth - PHONE_MARGINS - left : 900);
  const canvas = h("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "heat map",
    "aria-label": `${title}: ${height} rows, ${width} columns, from ${format.number(least, 3)} to ${format.number(most, 3)}. Arrow keys move from cell to cell.`,
  });
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a cell, or use the arrow keys.");
  const element = h("figure", { class: "heat", style: { margin: "0" } }, h("figcaption", {}, h("h3", {}, title)), h("div", { class: "scroll" }, canvas), readout, scaleBar(least, most));
  let cursor = null;

  function draw() {
    const ratio = devicePixelRatio || 1;
    const [fullWidth, fullHeight] = [left + width * size, top + height * size];
    canvas.width = fullWidth * ratio;
    canvas.height = fullHeight * ratio;
    canvas.style.setProperty("width", `${fullWidth}px`);
    canvas.style.setProperty("aspect-ratio", `${fullWidth} / ${fullHeight}`);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    drawNames(pen);
    pen.translate(left, top);
    pen.font = `${Math.min(12, Math.floor(size / 3.4))}px system-ui`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    values.forEach((row, y) => row.forEach((value, x) => {
      const shade = colourAt((value - least) / (most - least || 1));
      pen.fillStyle = `rgb(${shade.join()})`;
      pen.fillRect(x * size, y * size, size, size);
      if (size < 34) return;
      pen.fillStyle = brightness(shade) > 140 ? "#000" : "#fff";
      pen.fillText(value.toFixed(2), (x + 0.5) * size, (y + 0.5) * size);
    }));
    if (!cursor) return;
    pen.strokeStyle = "#fff";
    pen.lineWidth = 4;
    pen.strokeRect(cursor[1] * size + 2, cursor[0] * size + 2, size - 4, size - 4);
    pen.strokeStyle = "#000";
    pen.lineWidth = 1.5;
    pen.strokeRect(cursor[1] * size + 2, cursor[0] * size + 2, size - 4, size - 4);
  }

  function label(name, at) {
    return verticalNames ? name : `${at + 1}  ${name}`;
  }

  function drawNames(pen) {
    pen.font = font;
    pen.fillStyle = colour("text");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    rowNames.forEach((name, at) => pen.fillText(shortened(pen, label(name, at), left - 8), left - 6, top + (at + 0.5) * size));
    columnNames.forEach((name, at) => {
      if (!verticalNames) {
        pen.textAlign = "center";
        pen.fillText(String(at + 1), left + (at + 0.5) * size, top / 2);
        return;
      }
      pen.save();
      pen.translate(left + (at + 0.5) * size, top - 6);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(shortened(pen, name, top - 8), 0, 0);
      pen.restore();
    });
  }

  function pick(row, column) {
    cursor = [Math.min(height - 1, Math.max(0, row)), Math.min(width - 1, Math.max(0, column))];
    const value = values[cursor[0]][cursor[1]];
    readout.textContent = `${format.number(value, 5)} — ${rowNames[cursor[0]]} × ${columnNames[cursor[1]]}`;
    canvas.dataset.value = String(value);
    draw();
    onpick?.(...cursor);
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const scale = (left + width * size) / box.width;
    pick(Math.floor(((event.clientY - box.top) * scale - top) / size), Math.floor(((event.clientX - box.left) * scale - left) / size));
  }

  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);  // a finger that taps does not move
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = cursor ?? [-Math.max(0, step[0]), -Math.max(0, step[1])];
    pick(row + step[0], column + step[1]);
  });
  draw();
  canvas.redraw = draw;
  return { element, pick };
}

function widest(texts, font) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = font;
  return Math.ceil(Math.max(0, ...texts.map((text) => pen.measureText(text.slice(0, 100)).width)));
}

/** A text that fits into `most` pixels, with an ellipsis if it is cut. */
function shortened(pen, text, most) {
  if (pen.measureText(text).width <= most) return text;
  let end = Math.min(text.length, 100);
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > most) end -= 1;
  return `${text.slice(0, end)}…`;
}

function scaleBar(least, most) {
  const steps = Array.from({ length: 9 }, (_, at) => `rgb(${colourAt(at / 8).join()})`);
  return h("p", { class: "legend" }, format.number(least, 3),
    h("span", { "aria-hidden": "true", style: { width: "140px", height: "12px", "align-self": "center", background: `linear-gradient(90deg, ${steps.join()})` } }), format.number(most, 3));
}
