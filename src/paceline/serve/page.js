"use strict";
// Asks for the status once a second and writes it into the page. What comes from the server is only ever set as text.
(() => {
  const EVERY_MS = 1000, LIMIT_MS = 8000, SHORTEST_S = 60;
  const SVG = "http://www.w3.org/2000/svg";
  const at = (id) => document.getElementById(id);
  const element = (name, kind, text) => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const keep = (() => { // a browser may forbid it
    try { return window.sessionStorage; } catch { return { getItem: () => "", setItem: () => {}, removeItem: () => {} }; }
  })();
  let token = keep.getItem("token") || "", heard = 0, timer = 0;

  // ---- words

  const number = (v, unit) => {
    if (v === null || v === undefined) return "-";
    const size = Math.abs(v);
    const text = size >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(3)));
    return unit ? `${text} ${unit}` : text;
  };
  const ago = (s) => {
    s = Math.max(0, Math.round(s));
    if (s < 100) return `${s} s`;
    if (s < 6000) return `${Math.round(s / 60)} min`;
    return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
  };

  // ---- charts

  const ticks = (low, high) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / 3));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => (high - low) / n <= 4);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  };
  const makeChart = (key, title, series, options) => {
    const figure = element("figure", options.wide ? "chart wide" : "chart");
    figure.dataset.key = key;
    const caption = element("figcaption"), last = element("span", "last");
    caption.append(element("h3", "", title), last);
    const legend = element("div", "legend");
    if (series.length > 1) {
      for (const one of series) {
        const entry = element("span");
        entry.append(element("i", one.kind), one.name);
        legend.append(entry);
      }
    }
    const plot = element("div", "plot"), svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    const path = (kind) => {
      const made = document.createElementNS(SVG, "path");
      made.setAttribute("class", kind);
      svg.append(made);
      return made;
    };
    const grid = path("grid"), lines = [...series].reverse().map((one) => path(`line ${one.kind}`)).reverse();
    const marks = element("div"), empty = element("span", "empty", options.empty || "nothing yet");
    const rule = element("span", "rule"), tip = element("span", "tip");
    plot.append(svg, marks, empty, rule, tip);
    figure.append(caption, legend, plot);
    at("charts").append(figure);
    rule.hidden = tip.hidden = true;
    let drawn = null, pointer = null;

    const point = () => {
      rule.hidden = tip.hidden = true;
      if (pointer === null || !drawn || !drawn.x.length) return;
      const [x0, x1] = drawn.span, wanted = x0 + pointer * (x1 - x0);
      let best = 0;
      drawn.x.forEach((x, i) => { if (Math.abs(x - wanted) < Math.abs(drawn.x[best] - wanted)) best = i; });
      const across = (100 * (drawn.x[best] - x0)) / (x1 - x0);
      const said = series.map((one, i) => `${one.name}  ${number(drawn.y[i][best], options.unit)}`);
      tip.textContent = [`${ago(drawn.now - drawn.x[best])} ago`, ...said].join("\n");
      rule.style.left = `${across}%`;
      tip.style.left = across < 50 ? `calc(${across}% + 12px)` : "auto";
      tip.style.right = across < 50 ? "auto" : `calc(${100 - across}% + 12px)`;
      rule.hidden = tip.hidden = false;
    };
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      pointer = (event.clientX - box.left) / box.width;
      point();
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", () => { pointer = null; point(); });

    return (now, x, columns) => {
      const span = [Math.min(x.length ? x[0] : now, now - SHORTEST_S), now];
      const values = columns.flat().filter((v) => v !== null);
      empty.hidden = values.length > 0;
      last.textContent = columns[0].length ? number(columns[0][columns[0].length - 1], options.unit) : "";
      let low = options.zero ? 0 : Math.min(...values), high = Math.max(...values);
      if (!values.length) { low = 0; high = 1; }
      const least = options.least || 1e-3;
      if (high - low < least) {
        low = options.zero ? 0 : (low + high - least) / 2;
        high = low + least;
      }
      const room = (high - low) * 0.06;
      high += room;
      if (!options.zero) low -= room;
      const across = (t) => (100 * (t - span[0])) / (span[1] - span[0]), up = (v) => 100 - (100 * (v - low)) / (high - low);
      lines.forEach((line, i) => {
        let d = "", on = false;
        columns[i].forEach((v, j) => {
          if (v === null) { on = false; return; }
          const X = across(x[j]).toFixed(2), Y = up(v).toFixed(2);
          d += !on ? `M${X} ${Y}h0` : options.steps ? `H${X}V${Y}` : `L${X} ${Y}`;
          on = true;
        });
        line.setAttribute("d", d);
      });
      marks.replaceChildren();
      let rules = "";
      for (const v of ticks(low, high)) {
        if (options.whole && !Number.isInteger(v)) continue;
        const mark = element("span", "y", number(v));
        mark.style.top = `${up(v)}%`;
        marks.append(mark);
        rules += `M0 ${up(v).toFixed(2)}H100`;
      }
      for (const share of [0, 50, 100]) {
        const t = span[0] + (share / 100) * (span[1] - span[0]);
        const mark = element("span", "x", share === 100 ? "now" : `-${ago(now - t)}`);
        mark.style.left = `${share}%`;
        marks.append(mark);
      }
      grid.setAttribute("d", rules);
      drawn = { span, x, y: columns, now };
      point();
    };
  };
  const charts = [
    [["version"], makeChart("version", "version that is served", [{ name: "version", kind: "first" }],
      { steps: true, whole: true, least: 2, wide: true })],
    [["p50_ms", "p99_ms"], makeChart("latency", "latency, ms", [{ name: "p50", kind: "first" }, { name: "p99", kind: "second" }],
      { zero: true, unit: "ms", empty: "no requests yet" })],
    [["answered", "refused"], makeChart("rate", "requests per second",
      [{ name: "answered", kind: "first" }, { name: "refused", kind: "bad" }], { zero: true, least: 1 })],
    [["queue"], makeChart("queue", "items that wait", [{ name: "waiting", kind: "first" }], { zero: true, whole: true, least: 4 })],
    [["metric"], makeChart("metric", "on the holdout", [{ name: "metric", kind: "first" }],
      { steps: true, least: 0.02, empty: "no holdout was given" })],
  ];

  // ---- the page

  const say = (text, ill) => {
    at("said").textContent = text;
    at("said").className = ill ? "ill" : "";
  };
  const show = (status) => {
    const { standing, seconds, learning } = status;
    const newest = (name) => (seconds[name].length ? seconds[name][seconds[name].length - 1] : null);
    at("name").textContent = status.name;
    document.title = `${status.name} · Paceline serve`;
    at("version").textContent = standing.current ? `version ${standing.current}` : "no version yet";
    at("pinned").textContent = standing.pinned ? `pinned to ${standing.pinned}` : "";
    at("version").hidden = false;
    at("pinned").hidden = !standing.pinned;
    at("paused").hidden = !standing.paused;
    at("health").textContent = standing.note ? `${standing.source}; ${standing.note}` : standing.source;
    at("health").className = standing.lost ? "facts ill" : "facts";
    const { ready = 0, ...others } = status.replicas;
    const all = Object.values(others).reduce((a, b) => a + b, ready);
    const tiles = [
      ["requests/s", number(newest("answered"))], ["p50, ms", number(newest("p50_ms"))], ["p99, ms", number(newest("p99_ms"))],
      ["waiting", number(newest("queue"))], ["holdout", number(newest("metric"))], ["replicas", `${ready} of ${all}`],
      ["answered", number(status.answered)], ["refused", number(status.refused)],
    ];
    at("tiles").replaceChildren(...tiles.map(([name, value]) => {
      const tile = element("div");
      tile.append(element("dt", "", name), element("dd", "", value));
      return tile;
    }));
    at("pause").hidden = standing.paused;
    at("resume").hidden = !standing.paused;
    at("unpin").hidden = !standing.pinned;
    at("rollback").disabled = standing.versions.length < 2;
    for (const [names, draw] of charts) draw(status.now, seconds.at, names.map((name) => seconds[name]));
    showVersions(status);
    at("refusals").hidden = !standing.refusals.length;
    at("reasons").replaceChildren(...standing.refusals.slice(-5).reverse().map((refusal) => {
      const version = refusal.source_version === null ? "" : `version ${refusal.source_version} at its source: `;
      return element("li", "", `${ago(status.now - refusal.at)} ago, ${version}${refusal.reason}`);
    }));
    at("learning").hidden = !learning;
    if (learning) {
      at("learned").textContent = `${number(learning.uploaded)} samples given to the run, ${number(learning.waiting)} wait, `
        + `${number(learning.refused)} refused, ${number(learning.lost)} lost. ${learning.words}`;
      at("learned").className = learning.words ? "facts ill" : "facts";
    }
    document.querySelector("footer").hidden = Boolean(token); // links cannot bring it
    at("figures").hidden = false;
  };
  let table = "";
  const showVersions = ({ standing, now }) => {
    const rows = standing.versions.slice().reverse();
    const told = JSON.stringify([rows, standing.current, standing.pinned]);
    if (told !== table) { // else a row under the pointer would be replaced while it is clicked
      table = told;
      at("versions").replaceChildren(...rows.map((version) => {
        const row = element("tr", version.number === standing.current ? "served" : "");
        const said = [version.number === standing.current && "served", version.number === standing.pinned && "pinned"];
        const button = element("button", "pin", "Pin");
        button.disabled = version.number === standing.pinned;
        button.addEventListener("click", () => order("pin", { version: version.number }));
        const cell = element("td"), made = element("td", "made");
        made.dataset.at = version.made_at;
        cell.append(button);
        row.append(element("td", "", number(version.number)), element("td", "roomy", number(version.source_version)), made,
          element("td", "", number(version.metric)), element("td", "text", said.filter(Boolean).join(", ")), cell);
        return row;
      }));
    }
    for (const made of document.querySelectorAll("#versions .made")) made.textContent = `${ago(now - made.dataset.at)} ago`;
  };

  // ---- the server

  const ask = (path, options = {}) => fetch(path, {
    ...options,
    cache: "no-store",
    headers: { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers },
    signal: AbortSignal.timeout(LIMIT_MS),
  });
  const why = async (answer) => {
    try { return (await answer.json()).error || `status ${answer.status}`; } catch { return `status ${answer.status}`; }
  };
  const order = async (name, body) => {
    const buttons = [...document.querySelectorAll("#figures button")].filter((button) => !button.disabled);
    say(""); buttons.forEach((button) => { button.disabled = true; });
    try {
      const answer = await ask(`versions/${name}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: body ? JSON.stringify(body) : undefined,
      });
      if (!answer.ok) say(await why(answer), true);
    } catch (error) {
      say(`not done: ${error.message}`, true);
    }
    buttons.forEach((button) => { button.disabled = false; });
    table = "";
    look();
  };
  const wantToken = () => {
    at("wrong").textContent = token ? "That is not its token." : "";
    token = "";
    keep.removeItem("token");
    at("figures").hidden = true;
    at("ask").hidden = false;
    at("token").focus();
  };
  const look = async () => {
    clearTimeout(timer);
    let again = true;
    try {
      const answer = await ask("status");
      if (answer.status === 401) {
        wantToken();
        again = false;
      } else if (!answer.ok) {
        throw new Error(await why(answer));
      } else {
        show(await answer.json());
        heard = Date.now();
        if (token) keep.setItem("token", token);
        at("silent").hidden = at("ask").hidden = true;
      }
    } catch (error) {
      const since = heard ? ` for ${ago((Date.now() - heard) / 1000)}; what is below is of then` : "";
      at("silent").textContent = `No answer from the server${since} (${error.message}).`;
      at("silent").hidden = false;
    }
    if (again && !document.hidden) {
      clearTimeout(timer);
      timer = setTimeout(look, EVERY_MS);
    }
  };
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value.trim();
    at("token").value = "";
    look();
  });
  for (const name of ["pause", "resume", "rollback", "unpin"]) at(name).addEventListener("click", () => order(name));
  document.addEventListener("visibilitychange", () => { if (!document.hidden && at("ask").hidden) look(); });
  look();
})();
