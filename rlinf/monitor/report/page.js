"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  };
  const write = (parent, x, y, text, attributes = {}) => {
    make("text", { x, y, ...attributes }, parent).textContent = text;
  };
  const html = (name, parent, text) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const showTip = (event, text) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
    tip.style.left = `${event.clientX + (right ? -14 - tip.offsetWidth : 14)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)}px`;
  };

  // Round distances between marks: 1, 2 or 5 times a power of ten.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
    return { found, step };
  };
  const seconds = (micro, step) => {
    if (step < 1e3) return `${(micro / 1e3).toFixed(Math.max(0, Math.ceil(-Math.log10(step / 1e3))))} ms`;
    return `${(micro / 1e6).toFixed(Math.max(0, Math.ceil(-Math.log10(step / 1e6))))} s`;
  };
  const short = (micro) => {
    if (micro < 1e3) return `${micro} µs`;
    return micro < 1e6 ? `${(micro / 1e3).toPrecision(3)} ms` : `${(micro / 1e6).toPrecision(4)} s`;
  };
  const number = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(3)}`;
  };

  // -- timeline ---------------------------------------------------------------------------------

  const LEFT = 150, HEAD = 22, RIGHT = 8;
  const HEIGHT = { device: 24, worker: 18, driver: 14 };
  const gantt = document.getElementById("gantt");
  const panels = [];
  const view = { begin: 0, end: 1 };
  const whole = { begin: 0, end: Math.max(1, ...data.panels.map((panel) => panel.end)) };

  const drawBar = (group, panel, row, bar, top, height, x0, x1) => {
    const kind = panel.kinds[bar[2]];
    const box = { x: x0.toFixed(1), y: top, width: Math.max(0.7, x1 - x0).toFixed(1), height };
    if (kind === "wait") make("rect", { ...box, class: "wait-bar" }, group);
    else if (kind === "transfer") make("rect", { ...box, y: top + height - 4, height: 4, class: "transfer-bar" }, group);
    else if (kind === "residency") make("rect", { ...box, class: "residency-bar" }, group);
    else if (kind === "lease") make("rect", { ...box, class: "lease-bar" }, group);
    else make("rect", { ...box, fill: panel.colors[bar[4]], opacity: row.kind === "device" ? 1 : 0.8 }, group);
  };

  // A panel of another clock is laid so that its first step begins with the one that is looked at.
  const shiftOf = (panel) => {
    const [first] = panels;
    if (panel === first.panel || !first.panel.steps.length || !panel.steps.length) return 0;
    const middle = (view.begin + view.end) / 2;
    const seen = first.panel.steps.filter(([, begin]) => begin <= middle).pop() ?? first.panel.steps[0];
    return seen[1] - panel.steps[0][1];
  };

  const drawPanel = (entry) => {
    const { panel, svg } = entry;
    const shift = (entry.shift = shiftOf(panel));
    const from = view.begin - shift, until = view.end - shift;
    const width = Math.max(400, svg.clientWidth || 1000);
    const room = width - LEFT - RIGHT;
    const scale = room / (view.end - view.begin);
    const at = (time) => LEFT + (time - from) * scale;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${entry.height}`);
    svg.setAttribute("height", entry.height);
    const marks = ticks(from, until, Math.max(2, Math.floor(room / 110)));
    for (const mark of marks.found) {
      make("line", { x1: at(mark), x2: at(mark), y1: HEAD, y2: entry.height, class: "grid" }, svg);
      write(svg, at(mark) + 3, 13, seconds(mark, marks.step), { class: "small" });
    }
    let top = HEAD;
    entry.places = [];
    panel.rows.forEach((row) => {
      const height = HEIGHT[row.kind];
      if (row.kind === "device") top += 5;
      write(svg, row.kind === "device" ? 2 : 14, top + height / 2 + 4, row.label.slice(0, 22),
        row.kind === "device" ? { "font-weight": 600 } : { class: "small" });
      make("rect", { x: LEFT, y: top, width: room, height: height - 2, class: "ground" }, svg);
      const group = make("g", {}, svg);
      const drawnTo = new Map();
      for (const bar of row.bars) {
        if (bar[0] > until || bar[0] + bar[1] < from) continue;
        const x0 = Math.max(LEFT, at(bar[0]));
        const x1 = Math.min(LEFT + room, at(bar[0] + bar[1]));
        // What would fall on the same pixel as the bar before is not drawn again.
        const key = bar[2] * 64 + bar[4];
        if (x1 < (drawnTo.get(key) ?? -1) + 0.5) continue;
        drawnTo.set(key, Math.max(x1, x0 + 0.7));
        drawBar(group, panel, row, bar, top, height - 2, x0, x1);
      }
      entry.places.push({ row, top, bottom: top + height });
      top += height;
    });
    for (const [step, begin] of panel.steps) {
      const x = at(begin);
      if (x < LEFT - 1 || x > width - RIGHT) continue;
      make("line", { x1: x, x2: x, y1: 14, y2: entry.height, class: "stepline" }, svg);
      write(svg, x + 3, entry.height - 3, `step ${step}`, { class: "small" });
    }
  };

  const where = document.getElementById("gantt-where");
  const draw = () => {
    panels.forEach(drawPanel);
    if (where) where.textContent = `${short(Math.round(view.end - view.begin))} shown`;
  };
  const move = (begin, end) => {
    const span = Math.min(Math.max(end - begin, 50), whole.end - whole.begin);
    view.begin = Math.min(Math.max(begin, whole.begin), whole.end - span);
    view.end = view.begin + span;
    draw();
  };
  const zoom = (factor, center = (view.begin + view.end) / 2) =>
    move(center - (center - view.begin) * factor, center + (view.end - center) * factor);
  const show = ([, begin, end]) => {
    const margin = (end - begin) * 0.03;
    move(begin - margin, end + margin);
  };
  const toStep = (direction) => {
    const steps = data.panels[0].steps;
    const middle = (view.begin + view.end) / 2;
    // Steps may overlap: the one in view is that whose middle is nearest.
    const distance = ([, begin, end]) => Math.abs((begin + end) / 2 - middle);
    const now = steps.reduce((best, step, i) => (distance(step) < distance(steps[best]) ? i : best), 0);
    if (steps.length) show(steps[Math.min(Math.max(now + direction, 0), steps.length - 1)]);
  };

  const pointer = (entry, event) => {
    const box = entry.svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    const time = view.begin + ((x - LEFT) / (box.width - LEFT - RIGHT)) * (view.end - view.begin);
    return { time, own: time - entry.shift, y: event.clientY - box.top, inside: x >= LEFT };
  };
  const describe = (entry, { own: time, y, inside }) => {
    const place = inside && entry.places.find((each) => y >= each.top && y < each.bottom);
    if (!place) return "";
    const slack = (view.end - view.begin) / 1500;
    const hit = place.row.bars.filter((bar) => bar[0] - slack <= time && time <= bar[0] + bar[1] + slack);
    hit.sort((a, b) => b[1] - a[1]);
    return hit.slice(-4).map((bar) => `${entry.panel.names[bar[3]]}: ${short(bar[1])}`).join("\n");
  };

  data.panels.forEach((panel) => {
    const figure = html("figure", gantt);
    html("figcaption", figure, panel.title);
    const svg = make("svg", { tabindex: 0, role: "img", "aria-label": `${panel.title} timeline` }, figure);
    const devices = panel.rows.filter((row) => row.kind === "device").length;
    const height = HEAD + 14 + devices * 5 + panel.rows.reduce((sum, row) => sum + HEIGHT[row.kind], 0);
    const entry = { panel, svg, height, places: [], shift: 0 };
    panels.push(entry);
    let drag = null;
    svg.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, begin: view.begin, end: view.end };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (drag) {
        const shift = ((drag.x - event.clientX) / (svg.clientWidth - LEFT - RIGHT)) * (drag.end - drag.begin);
        move(drag.begin + shift, drag.end + shift);
      }
      showTip(event, describe(entry, pointer(entry, event)));
    });
    svg.addEventListener("pointerup", () => { drag = null; });
    svg.addEventListener("pointerleave", (event) => { showTip(event, ""); });
    svg.addEventListener("dblclick", (event) => zoom(0.5, pointer(entry, event).time));
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, pointer(entry, event).time);
    }, { passive: false });
    svg.addEventListener("keydown", (event) => {
      const span = view.end - view.begin;
      const actions = {
        ArrowLeft: () => move(view.begin - span / 5, view.end - span / 5),
        ArrowRight: () => move(view.begin + span / 5, view.end + span / 5),
        "+": () => zoom(0.6), "-": () => zoom(1 / 0.6),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
    });
  });
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), fit: () => move(whole.begin, whole.end),
    previous: () => toStep(-1), next: () => toStep(1),
  };
  document.querySelectorAll("[data-gantt]").forEach((button) =>
    button.addEventListener("click", actions[button.dataset.gantt]));
  if (panels.length) {
    // One step is what a person can read; it begins with the last one.
    const steps = data.panels[0].steps;
    move(whole.begin, whole.end);
    if (steps.length) show(steps.at(-1));
    addEventListener("resize", draw);
  }

  // -- charts -----------------------------------------------------------------------------------

  const PALETTE = ["#4269d0", "#ff725c", "#3ca951", "#a463f2", "#efb118", "#6cc5b0", "#9c6b4e", "#97bbf5"];
  const chartsRoot = document.getElementById("charts");

  const range = (chart) => {
    const xs = [], ys = [];
    for (const series of chart.series) {
      for (const [x, y] of series.points) { xs.push(x); ys.push(y); }
      for (const [, low, high] of series.band ?? []) ys.push(low, high);
    }
    const least = (list) => list.reduce((a, b) => Math.min(a, b), Infinity);
    const most = (list) => list.reduce((a, b) => Math.max(a, b), -Infinity);
    let [bottom, top] = chart.bounds ?? [chart.zero ? 0 : least(ys), most(ys)];
    if (bottom === top) { bottom -= Math.abs(bottom) * 0.1 || 0.5; top += Math.abs(top) * 0.1 || 0.5; }
    return { left: Math.min(0, least(xs)), right: most(xs) || 1, bottom, top };
  };

  const drawChart = (chart) => {
    const W = 460, H = 230, L = 48, R = 10, T = 10, B = 36;
    const figure = html("figure", chartsRoot);
    html("figcaption", figure, chart.title);
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": chart.title }, figure);
    const area = range(chart);
    const X = (x) => L + ((x - area.left) / (area.right - area.left || 1)) * (W - L - R);
    const Y = (y) => H - B - ((y - area.bottom) / (area.top - area.bottom)) * (H - T - B);
    for (const y of ticks(area.bottom, area.top, 4).found) {
      make("line", { x1: L, x2: W - R, y1: Y(y), y2: Y(y), class: "grid" }, svg);
      write(svg, L - 6, Y(y) + 4, number(y), { class: "small", "text-anchor": "end" });
    }
    for (const x of ticks(area.left, area.right, 5).found) {
      write(svg, X(x), H - B + 15, number(x), { class: "small", "text-anchor": "middle" });
    }
    write(svg, (L + W - R) / 2, H - 4, chart.bottom, { class: "small", "text-anchor": "middle" });
    const legend = html("div", figure);
    legend.className = "legend";
    chart.series.forEach((series, place) => {
      const color = PALETTE[place % PALETTE.length];
      for (const [x, low, high] of series.band ?? []) {
        make("line", { x1: X(x), x2: X(x), y1: Y(low), y2: Y(high), stroke: color, "stroke-width": 1.2 }, svg);
      }
      const points = series.points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" ");
      make("polyline", { points, stroke: color }, svg);
      if (series.points.length < 60) {
        for (const [x, y] of series.points) make("circle", { cx: X(x), cy: Y(y), r: 2, fill: color }, svg);
      }
      if (chart.series.length > 1) {
        const item = html("span", legend);
        html("span", item).className = "key";
        item.firstChild.style.background = color;
        item.append(series.label);
      }
    });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = area.left + (((event.clientX - box.left) * (W / box.width) - L) / (W - L - R)) * (area.right - area.left);
      const lines = chart.series.map((series) => {
        const near = series.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
        return `${series.label}: ${number(near[1])} (${chart.bottom} ${number(near[0])})`;
      });
      showTip(event, lines.join("\n"));
    });
    svg.addEventListener("pointerleave", (event) => showTip(event, ""));
  };
  data.charts.forEach(drawChart);

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
