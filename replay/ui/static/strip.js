// The whole log in one strip: pages held and cached behind, requests running and waiting before; the cursors.

import { $, colour, fit } from "./dom.js";

export function drawStrip(app) {
  const { draw, width, height } = fit($("strip"));
  const found = app.strip;
  if (!found?.buckets) return;
  const last = Math.max(app.meta.expected, found.last);
  const whole = last - found.first + 1;
  const x = (seq) => ((seq - found.first + 0.5) / whole) * width;
  const filled = ((found.last - found.first + 1) / whole) * width;
  const step = filled / found.buckets;
  const base = height - 14;
  const area = (values, most, fill, alpha, from = null) => {
    draw.globalAlpha = alpha;
    draw.fillStyle = fill;
    draw.beginPath();
    draw.moveTo(0, base);
    values.forEach((value, at) => {
      const y = base - (Math.min(1, (value + (from ? from[at] : 0)) / most)) * (base - 24);
      draw.lineTo(at * step, y);
      draw.lineTo((at + 1) * step, y);
    });
    draw.lineTo(filled, base);
    draw.fill();
    draw.globalAlpha = 1;
  };
  const pages = app.meta.config.num_pages || 1;
  area(found.cached, pages, colour("cached"), 0.35, found.held);
  area(found.held, pages, colour("prefill"), 0.22);
  const most = Math.max(1, ...found.running, ...found.waiting);
  const line = (values, stroke) => {
    draw.strokeStyle = stroke;
    draw.lineWidth = 1.5;
    draw.beginPath();
    values.forEach((value, at) => draw.lineTo((at + 0.5) * step, base - (value / most) * (base - 26)));
    draw.stroke();
  };
  line(found.running, colour("decode"));
  line(found.waiting, colour("waiting"));
  found.preempted.forEach((value, at) => mark(at, value, "preempted"));
  found.loud.forEach((value, at) => mark(at, value, "accent"));
  function mark(at, value, name) {
    if (!value) return;
    draw.fillStyle = colour(name);
    draw.fillRect(at * step, base + (name === "accent" ? 7 : 2), Math.max(2, step), 4);
  }
  if (app.kept != null) {
    draw.fillStyle = colour("hypo-ink");
    draw.globalAlpha = 0.13;
    draw.fillRect(x(app.kept), 0, width - x(app.kept), height);
    draw.globalAlpha = 1;
  }
  draw.font = "11px system-ui, sans-serif";
  [["running", "decode"], ["waiting", "waiting"], ["pages held", "prefill"], ["cached", "cached"], ["preempted", "preempted"]].reduce((left, [text, name]) => {
    draw.fillStyle = colour(name);
    draw.fillRect(left, 8, 8, 8);
    draw.fillStyle = colour("soft");
    draw.fillText(text, left + 12, 16);
    return left + 26 + draw.measureText(text).width;
  }, 10);
  const [first, until] = app.window();
  draw.strokeStyle = colour("soft");
  draw.lineWidth = 1;
  draw.strokeRect(x(first) + 0.5, 0.5, Math.max(3, x(until) - x(first)), height - 1);
  if (app.b && app.b.world === app.world) cursor(x(app.b.seq), colour("b"), "B");
  cursor(x(app.seq), colour("accent"), "A");
  function cursor(at, fill, text) {
    draw.fillStyle = fill;
    draw.fillRect(at - 1, 0, 2, height);
    draw.beginPath();
    draw.roundRect(Math.min(at - 1, width - 15), height - 14, 14, 14, 3);
    draw.fill();
    draw.fillStyle = colour("card");
    draw.font = "bold 10px system-ui, sans-serif";
    draw.fillText(text, Math.min(at - 1, width - 15) + 4, height - 3.5);
  }
}

export function stripSeq(app, x) {
  const { left, width } = $("strip").getBoundingClientRect();
  const last = Math.max(app.meta.expected, app.strip.last);
  return Math.round(app.meta.first + ((x - left) / width) * (last - app.meta.first));
}
