"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const config = {
    responsive: true,
    displayModeBar: window.matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
  };
  let axis = "step";

  window.addEventListener("error", (event) => {
    const place = document.getElementById("script-error");
    place.hidden = false;
    place.textContent = "A figure could not be drawn: " + event.message;
  });

  const short = (number) => {
    for (const [size, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (number >= size && number >= 10000) return String(Number((number / size).toPrecision(3))) + suffix;
    }
    return number.toLocaleString("en");
  };

  // The places of a grid's checkpoints on an axis: log10(1 + value), with 0 apart (the same as in the Python figures).
  const places = (grid, spec, name) =>
    (name === "tokens" && grid.tokens ? grid.tokens : grid.steps).map((v) => (v > 0 ? Math.log10(1 + v) : spec.apart));
  const hover = (grid) =>
    grid.steps.map((step, i) => [
      "step " + step.toLocaleString("en") + (grid.tokens ? " · " + short(grid.tokens[i]) + " tokens" : ""),
    ]);

  // A figure as plotly wants it, on the axis that is chosen.
  function complete(number) {
    const figure = structuredClone(report.figures[number]);
    figure.layout.template = report.template;
    delete figure.layout.height; // the page says how high
    figure.layout.autosize = true;
    figure.config = config;
    const meta = figure.layout.meta;
    if (!meta || !meta.axes) return figure;
    const name = meta.axes[axis] ? axis : "step";
    const spec = meta.axes[name];
    for (const trace of figure.data) {
      if (!Number.isInteger(trace.meta)) continue;
      trace.x = places(meta.grids[trace.meta], spec, name);
      trace.customdata = hover(meta.grids[trace.meta]);
    }
    Object.assign(figure.layout.xaxis, { tickvals: spec.tickvals, ticktext: spec.ticktext, range: spec.range });
    figure.layout.xaxis.title = { ...figure.layout.xaxis.title, text: spec.title };
    for (const shape of figure.layout.shapes || []) {
      if (shape.xref !== "paper") shape.x0 = shape.x1 = spec.divider;
    }
    return figure;
  }

  const numberOf = (node) => {
    const choice = node.closest(".metric").querySelector("select");
    return Number(node.dataset.figures.split(" ")[choice ? choice.value : 0]);
  };

  function fail(node, sentence) {
    Plotly.purge(node);
    node.dataset.state = "failed";
    node.classList.add("failed");
    node.textContent = sentence;
  }

  async function draw(node) {
    node.dataset.state = "drawing";
    const { problem } = report.figures[numberOf(node)];
    if (problem) return fail(node, problem);
    if (node.classList.contains("failed")) {
      node.classList.remove("failed");
      node.textContent = "";
    }
    try {
      await Plotly.react(node, complete(numberOf(node)));
      node.dataset.state = "drawn";
    } catch (error) {
      fail(node, "This figure could not be drawn: " + error.message);
    }
  }

  // What is in sight first, the rest while the browser is idle.
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
    const [node] = waiting;
    if (!node) return;
    take(node);
    later(next);
  };
  later(next);

  document.querySelectorAll(".metric select").forEach((choice) =>
    choice.addEventListener("change", () => {
      choice.closest(".metric").querySelectorAll(".plot").forEach((node) => {
        waiting.delete(node);
        // Frames of the last variant would stay: start anew where there is a slider.
        if (report.figures[numberOf(node)].frames) Plotly.purge(node);
        draw(node);
      });
    }),
  );
  document.querySelectorAll("input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => {
      axis = input.value;
      for (const node of plots) {
        const meta = report.figures[numberOf(node)].layout.meta;
        if (!waiting.has(node) && meta && meta.axes) draw(node);
      }
    }),
  );
})();
