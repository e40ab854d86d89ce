// Draws the charts of a report as SVG, at the width that there is. No library: what is needed is
// lines over steps with a common cursor and zoom, and the page stays small.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const figures = [...document.querySelectorAll("figure.chart")];
  const SVG = "http://www.w3.org/2000/svg";
  let axis = "steps";
  let view = null; // the zoomed part of the x axis, as [low, high]
  const drawn = []; // for each chart what the cursor needs

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  // ---- values ----------------------------------------------------------------------------------

  const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];

  // A value with so many significant digits; `size` decides on the unit, so that ticks agree.
  function format(value, digits, percent, size = Math.abs(value)) {
    if (percent) return `${trim((value * 100).toPrecision(digits))}%`;
    if (value === 0) return "0";
    if (size >= 1e4) {
      const [unit, letter] = UNITS.find(([unit]) => size >= unit);
      return `${trim((value / unit).toPrecision(digits))}${letter}`;
    }
    if (size < 0.01) return value.toExponential(digits - 1).replace(/\.?0*e/, "e");
    return trim(value.toPrecision(Math.max(digits, 1 + Math.floor(Math.log10(Math.abs(value))))));
  }

  function trim(text) {
    return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((n) => n * power >= rough * 0.75) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
      found.push(Number((i * step).toPrecision(12)));
    }
    return found;
  }

  function decades(low, high) {
    const found = [];
    const few = high / low < 200;
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
      for (const n of few ? [1, 2, 5] : [1]) {
        const tick = Number((n * 10 ** power).toPrecision(3));
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    return found;
  }

  // ---- the x axis ------------------------------------------------------------------------------

  // Tokens after a step, along the straight pieces between the knots.
  function tokens(run, step) {
    const knots = page.axes[run].tokens;
    let i = 1;
    while (i < knots.length - 1 && knots[i][0] < step) i++;
    const [[x0, y0], [x1, y1]] = knots.length > 1 ? [knots[i - 1], knots[i]] : [[0, 0], knots[0]];
    return x1 === x0 ? y1 : y0 + ((y1 - y0) / (x1 - x0)) * (step - x0);
  }

  const place = (run, step) => (axis === "steps" ? step : tokens(run, step));

  function whole() {
    return [0, Math.max(...page.axes.map((run, i) => place(i, run.last)))];
  }

  // Bands are drawn where all runs have the same phases.
  function phases() {
    const all = page.axes.map((run) => JSON.stringify(run.phases));
    return all.every((text) => text === all[0]) ? page.axes[0].phases : [];
  }

  // ---- one chart -------------------------------------------------------------------------------

  function draw(figure, number) {
    const chart = page.charts[number];
    const plot = figure.querySelector(".plot");
    const width = Math.max(plot.clientWidth, 260);
    const height = number === 0 ? (width < 600 ? 230 : 330) : 220;
    const [low, high] = view || whole();
    const series = chart.series.map((s) => ({ ...s, px: s.x.map((x) => place(s.run, x)) }));
    const range = valueRange(chart, series, low, high);
    const yTicks = chart.log ? decades(...range) : ticks(...range, number === 0 ? 6 : 5);
    const size = Math.max(...yTicks.map(Math.abs), 0);
    const labels = yTicks.map((tick) => format(tick, 3, chart.percent, size));
    const left = 12 + 6.3 * Math.max(2, ...labels.map((label) => label.length));
    const box = { left, right: width - 8, top: 20, bottom: height - 36 };
    const x = (value) => box.left + ((value - low) / (high - low)) * (box.right - box.left);
    const y = scale(range, chart.log, box);

    plot.replaceChildren();
    const svg = add(plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    svg.setAttribute("aria-label", `${chart.title}, ${chart.unit}, by ${axis}`);
    const clip = `clip-${number}`;
    add(add(svg, "clipPath", { id: clip }), "rect", rectangle(box, 0));
    drawBands(svg, box, x, low, high);
    yTicks.forEach((tick, i) => {
      const at = y(tick);
      add(svg, "line", { class: "gridline", x1: box.left, x2: box.right, y1: at, y2: at });
      add(svg, "text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, labels[i]);
    });
    drawSteps(svg, box, x, low, high);
    drawResumes(svg, box, x, low, high);
    const inside = add(svg, "g", { "clip-path": `url(#${clip})` });
    for (const s of series) drawSeries(inside, svg, s, x, y, low, high);
    drawMarks(svg, chart, box, y, range);
    const cursor = add(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, hidden: "" });
    cursor.style.display = "none";
    drawLegend(figure, series, number === 0);
    drawn[number] = { box, low, high, series, cursor, svg, figure, chart, width };
    listen(svg, number);
  }

  function rectangle(box, grow) {
    return { x: box.left, y: box.top - grow, width: box.right - box.left,
      height: box.bottom - box.top + 2 * grow };
  }

  function valueRange(chart, series, low, high) {
    let least = Infinity, most = -Infinity;
    for (const s of series) {
      s.y.forEach((value, i) => {
        if (s.px[i] < low || s.px[i] > high || (chart.log && value <= 0)) return;
        if (value < least) least = value;
        if (value > most) most = value;
      });
    }
    if (least > most) [least, most] = chart.log ? [0.1, 1] : [0, 1];
    if (chart.log) return [least / 1.15, most * 1.15];
    if (chart.zero) least = 0;
    const spare = (most - least || Math.abs(most) || 1) * 0.06;
    const floor = least - (chart.zero ? 0 : spare);
    return [least >= 0 ? Math.max(0, floor) : floor, most + spare];
  }

  function scale([least, most], log, box) {
    const f = log ? Math.log10 : (value) => value;
    const span = f(most) - f(least);
    return (value) => {
      const safe = log ? Math.max(value, least / 10) : value;
      return box.bottom - ((f(safe) - f(least)) / span) * (box.bottom - box.top);
    };
  }

  function drawBands(svg, box, x, low, high) {
    phases().forEach(([name, first, last], i) => {
      const begin = Math.max(x(Math.max(place(0, first), low)), box.left);
      const end = Math.min(x(Math.min(place(0, last), high)), box.right);
      if (end <= begin) return;
      if (i % 2 === 0) {
        add(svg, "rect", { class: "band", x: begin, y: box.top, width: end - begin,
          height: box.bottom - box.top });
      }
      // The whole name, or its number, or nothing.
      const text = [name, name.replace(/^\D+/, "")].find((t) => t && 6.5 * t.length < end - begin - 2);
      if (text) {
        const at = { x: (begin + end) / 2, y: box.top - 7, "text-anchor": "middle", class: "phase" };
        add(svg, "text", at, text);
      }
    });
  }

  function drawSteps(svg, box, x, low, high) {
    add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    const found = ticks(low, high, Math.max(2, Math.floor((box.right - box.left) / 75)));
    const size = Math.max(...found.map(Math.abs));
    for (const tick of found) {
      const at = x(tick);
      add(svg, "line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 });
      // Centred below its mark, but inside the picture.
      const label = format(tick, 4, false, size);
      const half = 3.3 * label.length;
      const inside = Math.min(Math.max(at, box.left - 4 + half), box.right + 6 - half);
      add(svg, "text", { x: inside, y: box.bottom + 16, "text-anchor": "middle" }, label);
    }
    const title = { x: (box.left + box.right) / 2, y: box.bottom + 31, "text-anchor": "middle" };
    add(svg, "text", title, axis === "steps" ? "step" : "tokens trained on");
  }

  function drawResumes(svg, box, x, low, high) {
    page.axes.forEach((run, i) => {
      for (const step of run.resumes) {
        const value = place(i, step);
        if (value < low || value > high) continue;
        const at = x(value);
        add(svg, "line", { class: "resume", x1: at, x2: at, y1: box.top, y2: box.bottom });
        const flag = { class: "flag", d: `M${at - 4} ${box.top}h8l-4 6z` };
        add(add(svg, "path", flag), "title", {}, `${run.name} went on with step ${step}`);
      }
    });
  }

  function drawSeries(inside, svg, s, x, y, low, high) {
    let path = "";
    let points = 0;
    s.px.forEach((value, i) => {
      // One point beyond each edge, so that lines run to it.
      if ((s.px[i + 1] ?? Infinity) < low || (s.px[i - 1] ?? -Infinity) > high) return;
      const starts = !points || (s.breaks && s.px[i - 1] === value);
      path += `${starts ? "M" : "L"}${x(value).toFixed(1)} ${y(s.y[i]).toFixed(1)}`;
      points++;
    });
    // More points than pixels make a surface, which must not hide the mean on it.
    const dense = points > Math.abs(x(high) - x(low)) ? "dense" : "";
    const line = { class: `line ${s.style} ${dense} c${s.color % 8}`, d: path };
    add(inside, "path", { ...line, "data-series": s.name, "data-points": points });
    if (s.style !== "points" && points > 1) return;
    s.px.forEach((value, i) => {
      if (value < low || value > high) return;
      add(svg, "circle", { class: `dot c${s.color % 8}`, cx: x(value), cy: y(s.y[i]), r: 3 });
    });
  }

  function drawMarks(svg, chart, box, y, [least, most]) {
    for (const [value, text] of chart.marks || []) {
      if (value < least || value > most) continue;
      const at = y(value);
      add(svg, "line", { class: "mark", x1: box.left, x2: box.right, y1: at, y2: at });
      const label = { class: "halo", x: box.right - 4, y: at - 5, "text-anchor": "end" };
      add(svg, "text", label, text);
    }
  }

  function drawLegend(figure, series, resumes) {
    const legend = figure.querySelector(".legend");
    legend.replaceChildren();
    const keys = series.map((s) => [s.name, `line ${s.style} c${s.color % 8}`]);
    if (resumes && page.axes.some((run) => run.resumes.length)) keys.push(["went on here", "resume"]);
    for (const [name, style] of keys) {
      const key = document.createElement("span");
      key.className = "key";
      const swatch = add(key, "svg", { width: 18, height: 8, "aria-hidden": "true" });
      add(swatch, "line", { class: style, x1: 0, x2: 18, y1: 4, y2: 4 });
      const value = document.createElement("b");
      key.append(name, value);
      legend.append(key);
    }
  }

  // ---- cursor and zoom -------------------------------------------------------------------------

  function nearest(values, wanted) {
    let from = 0, to = values.length - 1;
    while (to - from > 1) {
      const middle = (from + to) >> 1;
      if (values[middle] < wanted) from = middle; else to = middle;
    }
    return Math.abs(values[from] - wanted) <= Math.abs(values[to] - wanted) ? from : to;
  }

  function valueAt(number, event) {
    const { box, low, high, svg, width } = drawn[number];
    const bounds = svg.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) / bounds.width) * width;
    const share = (at - box.left) / (box.right - box.left);
    return low + Math.min(Math.max(share, 0), 1) * (high - low);
  }

  function point(value) {
    for (const { box, low, high, series, cursor, figure, chart } of drawn) {
      const hidden = value === null;
      cursor.style.display = hidden ? "none" : "";
      const values = figure.querySelectorAll(".key b");
      if (hidden) {
        figure.querySelector(".at").textContent = "";
        values.forEach((node) => { node.textContent = ""; });
        continue;
      }
      const at = box.left + ((value - low) / (high - low)) * (box.right - box.left);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      let step = null;
      series.forEach((s, i) => {
        const found = nearest(s.px, value);
        // Beyond a curve's end it has no value.
        const ends = value > s.px[s.px.length - 1] * 1.01 || value < s.px[0] * 0.99;
        values[i].textContent = ends ? "" : format(s.y[found], 4, chart.percent);
        if (!ends && (step === null || s.style === "raw")) step = s.x[found];
      });
      figure.querySelector(".at").textContent = step === null ? "" : describe(step);
    }
  }

  function describe(step) {
    if (page.axes.length > 1) return `step ${step.toLocaleString("en")}`;
    const phase = page.axes[0].phases.find(([, first, last]) => step > first && step <= last);
    const parts = [`step ${step.toLocaleString("en")}`, phase ? phase[0] : ""];
    return [...parts, `${format(tokens(0, step), 3)} tokens`].filter(Boolean).join(" · ");
  }

  function listen(svg, number) {
    let from = null, selection = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = valueAt(number, event);
      svg.setPointerCapture(event.pointerId);
      selection = add(svg, "rect", { class: "selection", ...rectangle(drawn[number].box, 0), width: 0 });
    });
    svg.addEventListener("pointermove", (event) => {
      const value = valueAt(number, event);
      point(value);
      if (!selection) return;
      const { box, low, high } = drawn[number];
      const x = (v) => box.left + ((v - low) / (high - low)) * (box.right - box.left);
      selection.setAttribute("x", Math.min(x(from), x(value)));
      selection.setAttribute("width", Math.abs(x(from) - x(value)));
    });
    svg.addEventListener("pointerup", (event) => {
      if (!selection) return;
      const value = valueAt(number, event);
      const wide = Number(selection.getAttribute("width")) > 8;
      selection.remove();
      selection = null;
      if (wide) zoom([Math.min(from, value), Math.max(from, value)]);
    });
    svg.addEventListener("pointercancel", () => { selection?.remove(); selection = null; });
    svg.addEventListener("pointerleave", () => point(null));
    svg.addEventListener("dblclick", () => zoom(null));
  }

  // ---- the page --------------------------------------------------------------------------------

  function zoom(wanted) {
    view = wanted;
    document.querySelector("[data-reset]").hidden = !view;
    drawAll();
  }

  function drawAll() {
    figures.forEach(draw);
  }

  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const other of document.querySelectorAll("[data-axis]")) {
        other.setAttribute("aria-pressed", other === button);
      }
      zoom(null);
    });
  }
  document.querySelector("[data-reset]").addEventListener("click", () => zoom(null));
  let width = 0;
  new ResizeObserver(() => {
    const now = document.body.clientWidth;
    if (now !== width && width) drawAll();
    width = now;
  }).observe(document.body);
  addEventListener("beforeprint", drawAll);
  drawAll();
  document.documentElement.dataset.drawn = Math.round(performance.now());
})();
