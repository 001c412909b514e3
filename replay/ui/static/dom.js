// Elements and texts. Nothing here, or anywhere in this page, ever makes markup out of text.

export const $ = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat(9).filter((child) => child != null).map((child) => (child instanceof Node ? child : plain(child))));
  return made;
}

// Text as it may be shown: control characters as signs, what steers directions left out.
export function plain(value) {
  return String(value)
    .replace(/[\u0000-\u0009\u000b-\u001f]/g, (char) => String.fromCharCode(0x2400 + char.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

export function fit(canvas) {
  const box = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [Math.max(1, Math.round(box.width)), Math.max(1, Math.round(box.height))];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  return { draw, width, height };
}

let colours = null;
export function colour(name) {
  colours ??= getComputedStyle(document.documentElement);
  return colours.getPropertyValue(`--${name}`).trim();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colours = null));

const dark = matchMedia("(prefers-color-scheme: dark)");
export function hue(number, soft = false) {
  const turn = (number * 137.508 + 205) % 360;
  return `hsl(${turn.toFixed(0)} ${soft ? 22 : 56}% ${dark.matches ? (soft ? 30 : 56) : soft ? 78 : 54}%)`;
}

export function ms(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(Math.abs(value) < 100 ? 1 : 0)} ms`;
}

export const count = (value) => Number(value).toLocaleString("en-US");
export const seconds = (t) => `${(t / 1e6).toFixed(3)} s`;

export function tip(text, x, y) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = plain(text);
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.min(x + 14, innerWidth - width - 8)}px`;
  box.style.top = `${y + 18 + height > innerHeight ? y - height - 8 : y + 18}px`;
}
