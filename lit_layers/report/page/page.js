"use strict";
(async () => {
  const tell = (sentence) => {
    const place = document.getElementById("script-error");
    place.hidden = false;
    place.textContent = sentence;
  };
  window.addEventListener("error", (event) => tell("A figure could not be drawn: " + event.message));
  window.addEventListener("unhandledrejection", (event) => tell("A figure could not be drawn: " + event.reason.message));

  // The figures: base64 of gzip of JSON.
  if (!window.DecompressionStream) return tell("The figures of this page need a browser of 2023 or later.");
  const packed = Uint8Array.from(atob(document.getElementById("report-data").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const figures = await new Response(unpacked).json();
  const plots = [...document.querySelectorAll(".plot")];
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  const options = {
    mode: "vega-lite",
    ast: true, // expressions are interpreted: the page's security policy allows no code from text
    renderer: "canvas",
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: "figure",
  };

  // Colours on a dark page: as light as they were dark, of the same hue.
  const TEXTS = new Set(["s", "t", "w", "q", "title", "text", "subtitle", "domain", "values", "calculate", "labelExpr"]);
  function darkened(color) {
    if (color === "white") return "#161d26";
    if (color === "black") return "#f4f6f8";
    if (!/^#[0-9a-f]{6}$/.test(color)) return color;
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255);
    const [low, high] = [Math.min(r, g, b), Math.max(r, g, b)];
    const light = (low + high) / 2;
    const span = high - low;
    const strength = span === 0 ? 0 : span / (1 - Math.abs(2 * light - 1));
    const turn = span === 0 ? 0 : high === r ? (g - b) / span : high === g ? 2 + (b - r) / span : 4 + (r - g) / span;
    const chroma = (1 - Math.abs(2 * (0.1 + 0.8 * (1 - light)) - 1)) * strength;
    const part = (n) => {
      const k = (n + 2 * turn + 12) % 12;
      const value = 0.1 + 0.8 * (1 - light) - (chroma / 2) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
      return Math.round(255 * value).toString(16).padStart(2, "0");
    };
    return `#${part(0)}${part(8)}${part(4)}`;
  }
  function dark(part, key) {
    if (typeof part === "string") return TEXTS.has(key) ? part : darkened(part);
    if (Array.isArray(part)) return part.map((each) => dark(each, key));
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([name, each]) => [name, dark(each, name)]));
  }

  // A legend's columns by the width of the page: Vega knows the plot's only after it has given the legend its height.
  const inColumns = (part, width) => {
    if (Array.isArray(part)) return part.map((each) => inColumns(each, width));
    if (part === null || typeof part !== "object") return part;
    const room = /^max\(1, floor\(width \/ (\d+)\)\)$/.exec(part.expr || "");
    if (room) return Math.max(1, Math.floor((width - 60) / Number(room[1])));
    return Object.fromEntries(Object.entries(part).map(([name, each]) => [name, inColumns(each, width)]));
  };

  // On a phone the names of a timeline's rows stand above these: beside them they would leave no room for the rows.
  function named(spec, node) {
    node.dataset.height = node.dataset.height || node.clientHeight;
    const narrow = node.clientWidth < 560;
    node.style.height = node.dataset.height * (narrow ? 1.6 : 1) + "px";
    if (!narrow) return;
    const above = { labelAlign: "left", labelBaseline: "bottom", labelOffset: -10, labelPadding: 0, ticks: false };
    const axis = { ...spec.encoding.y.axis, ...above, domain: false, labelLimit: node.clientWidth - 8 };
    spec.encoding = { ...spec.encoding, y: { ...spec.encoding.y, axis } };
  }

  // A figure as Vega-Lite wants it.
  function complete(number, node) {
    const figure = figures[number];
    const shape = inColumns(figure.spec, node.clientWidth);
    const spec = { ...shape, data: { values: figure.rows.map((row) => ({ ...row })) } };
    for (const param of spec.params || []) delete param.bind; // the page has a slider of its own
    if (figure.square) {
      Object.assign(spec, { width: Math.min(node.clientWidth, node.clientHeight + 50), height: node.clientHeight });
    }
    if (isNamed(node)) named(spec, node);
    spec.autosize = { type: "fit", contains: "padding", resize: true };
    return isDark.matches ? dark(spec) : spec;
  }

  const isNamed = (node) => node.parentNode.classList.contains("named");
  const chosen = (node) => (node.closest(".metric").querySelector("select") || { value: 0 }).value;
  const numberOf = (node) => Number(node.dataset.figures.split(" ")[chosen(node)]);

  function clear(node) {
    if (node.view) node.view.finalize();
    node.view = null;
  }

  function fail(node, sentence) {
    clear(node);
    node.dataset.state = "failed";
    node.classList.add("failed");
    node.textContent = sentence;
  }

  // What a choice has no figure for is hidden with it; the captions are those of the choice.
  function place(node, absent) {
    const figure = node.closest("figure");
    const caption = figure.querySelector("figcaption");
    figure.hidden = Boolean(absent);
    if (caption) caption.textContent = JSON.parse(caption.dataset.captions)[chosen(node)];
  }

  // A slider over the checkpoints below a figure that has several; at the last one to begin with.
  function slide(node, frames, view) {
    const old = node.parentNode.querySelector(".slider");
    if (!frames) return old && old.remove();
    const slider = old || document.createElement("label");
    if (!old || Number(old.dataset.count) !== frames.length) {
      slider.className = "slider";
      slider.dataset.count = frames.length;
      slider.innerHTML = '<span></span><input type="range" min="0" step="1" aria-label="Checkpoint">';
      slider.lastChild.max = frames.length - 1;
      slider.lastChild.value = frames.length - 1;
      node.after(slider);
    }
    const show = () => {
      slider.firstChild.textContent = "Step " + frames[slider.lastChild.value].toLocaleString("en");
      view.signal("frame", Number(slider.lastChild.value)).run();
    };
    slider.lastChild.oninput = show;
    show();
  }

  async function draw(node) {
    node.dataset.state = "drawing";
    const number = numberOf(node);
    const { absent, problem, frames } = figures[number];
    place(node, absent);
    if (absent) node.dataset.state = "drawn";
    if (absent) return clear(node);
    if (problem) return fail(node, problem);
    if (node.classList.contains("failed")) {
      node.classList.remove("failed");
      node.textContent = "";
    }
    try {
      clear(node);
      const result = await vegaEmbed(node, complete(number, node), options);
      if (number !== numberOf(node)) return result.finalize(); // another was chosen meanwhile
      node.view = result.view;
      slide(node, frames, node.view);
      node.dataset.state = "drawn";
    } catch (error) {
      fail(node, "This figure could not be drawn: " + error.message);
    }
  }

  // What is in sight first, the rest while the browser is idle; what is folded has no width until it is opened.
  const isFolded = (node) => node.closest("details:not([open])") !== null;
  const waiting = new Set(plots);
  const take = (node) => {
    if (waiting.delete(node)) draw(node);
  };
  const watch = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => take(entry.target)),
    { rootMargin: "300px" },
  );
  plots.forEach((node) => watch.observe(node));
  const later = (work) => // a busy or hidden page is never idle: not later than after a while
    window.requestIdleCallback ? requestIdleCallback(work, { timeout: 300 }) : setTimeout(work, 30);
  const next = () => {
    const node = [...waiting].find((each) => !isFolded(each));
    if (!node) return;
    take(node);
    later(next);
  };
  later(next);
  document.querySelectorAll(".diagnostics").forEach((part) =>
    part.addEventListener("toggle", () => {
      window.dispatchEvent(new Event("resize")); // the window may have changed while it was folded
      later(next);
    }),
  );

  const again = (kept) =>
    plots
      .filter((node) => !waiting.has(node) && kept(figures[numberOf(node)], node))
      .forEach((node) => (isFolded(node) ? waiting.add(node) : draw(node)));
  document.querySelectorAll(".metric select").forEach((choice) =>
    choice.addEventListener("change", () => {
      choice.closest(".metric").querySelectorAll(".plot").forEach((node) => {
        waiting.delete(node);
        draw(node);
      });
    }),
  );
  isDark.addEventListener("change", () => again((figure) => !figure.problem));
  let timer;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => again((figure, node) => figure.square || isNamed(node)), 200);
  });
})();
