"use strict";
(async () => {
  const tell = (sentence) => {
    const place = document.getElementById("script-error");
    place.hidden = false;
    place.textContent = sentence;
  };
  window.addEventListener("error", (event) => tell("A figure could not be drawn: " + event.message));
  window.addEventListener("unhandledrejection", (event) => tell("A figure could not be drawn: " + event.reason.message));

  // The figures are JSON, compressed with gzip and encoded as base64.
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

  // Colours on a dark page: invert the lightness, keep the hue.
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

  // Compute the columns of a legend from the page's width: Vega lays out the legend before it knows the plot's width.
  const inColumns = (part, width) => {
    if (Array.isArray(part)) return part.map((each) => inColumns(each, width));
    if (part === null || typeof part !== "object") return part;
    const room = /^max\(1, floor\(width \/ (\d+)\)\)$/.exec(part.expr || "");
    if (room) return Math.max(1, Math.floor((width - 60) / Number(room[1])));
    return Object.fromEntries(Object.entries(part).map(([name, each]) => [name, inColumns(each, width)]));
  };

  // On narrow screens, put row names above their rows. Next to them they would leave no room for the plot.
  function named(spec, node) {
    node.dataset.height = node.dataset.height || node.clientHeight;
    const narrow = node.clientWidth < 560;
    node.style.height = node.dataset.height * (narrow ? 1.6 : 1) + "px";
    if (!narrow) return;
    const above = { labelAlign: "left", labelBaseline: "bottom", labelOffset: -10, labelPadding: 0, ticks: false };
    const axis = { ...spec.encoding.y.axis, ...above, domain: false, labelLimit: node.clientWidth - 8 };
    spec.encoding = { ...spec.encoding, y: { ...spec.encoding.y, axis } };
  }

  // Return the Vega-Lite specification of a figure at its current size.
  function complete(number, node) {
    const figure = figures[number];
    const shape = inColumns(figure.spec, node.clientWidth);
    const spec = { ...shape, data: { values: figure.rows.map((row) => ({ ...row })) } };
    for (const param of spec.params || []) delete param.bind; // the page draws its own slider
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

  // Hide the slots for which the choice has no figure, and show the captions of the choice.
  function place(node, absent) {
    const figure = node.closest("figure");
    const caption = figure.querySelector("figcaption");
    figure.hidden = Boolean(absent);
    if (caption) caption.textContent = JSON.parse(caption.dataset.captions)[chosen(node)];
  }

  // Add a slider below a figure with several checkpoints; it starts at the last one.
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
      if (number !== numberOf(node)) return result.finalize(); // the reader has chosen another figure meanwhile
      node.view = result.view;
      slide(node, frames, node.view);
      node.dataset.state = "drawn";
    } catch (error) {
      fail(node, "This figure could not be drawn: " + error.message);
    }
  }

  // Draw visible figures first, the others while the browser is idle. Folded figures have no width until opened.
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
  const later = (work) => // the timeout is needed because a busy or hidden page is never idle
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
      window.dispatchEvent(new Event("resize")); // the window size may have changed meanwhile
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
