"use strict";
// Shows the values under the pointer. The page is whole without it.
(() => {
  const { charts, epochs } = JSON.parse(document.getElementById("points").textContent);
  const clock = (s) => {
    s = Math.round(s);
    const two = (n) => String(n).padStart(2, "0");
    const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
    return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
  };
  const number = (v, unit) => {
    if (v === null || v === undefined) return "-";
    if (unit === "%") return `${Math.round(100 * v)}%`;
    const size = Math.abs(v);
    const text = size !== 0 && (size < 1e-3 || size >= 1e9) ? v.toExponential(3)
      : size >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4)));
    return unit ? `${text} ${unit}` : text;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  for (const figure of document.querySelectorAll("figure[data-key]")) {
    const data = charts[figure.dataset.key];
    if (!data || !data.x.length) continue;
    for (const plot of figure.querySelectorAll(".plot")) {
      const [x0, x1] = plot.dataset.x.split(" ").map(Number);
      const [y0, y1] = plot.dataset.y.split(" ").map(Number);
      const log = plot.classList.contains("log");
      const part = (kind) => {
        const made = document.createElement("span");
        made.className = kind;
        made.hidden = true;
        plot.append(made);
        return made;
      };
      const rule = part("rule"), dot = part("dot"), tip = part("tip");
      const hide = () => { rule.hidden = dot.hidden = tip.hidden = true; };
      plot.addEventListener("pointerleave", hide);
      const show = (event) => {
        const box = plot.getBoundingClientRect();
        const at = nearest(data.x, x0 + ((event.clientX - box.left) / box.width) * (x1 - x0));
        const x = data.x[at], across = (100 * (x - x0)) / (x1 - x0);
        let text;
        if (data.by === "time") {
          text = `at ${clock(x)}`;
        } else {
          text = `step ${Math.round(x).toLocaleString("en")}`;
          const epoch = epochs.filter(([step]) => step < x).pop();
          if (epoch) text += `, epoch ${epoch[1]}`;
        }
        for (const one of data.series) {
          text += `\n${one.name}  ${number(one.y[at], data.unit)}`;
          if (one.low && one.y[at] !== null) text += `\n${number(one.low[at])} to ${number(one.high[at])}`;
        }
        tip.textContent = text;
        rule.hidden = tip.hidden = false;
        rule.style.left = `${across}%`;
        tip.style.left = across < 50 ? `calc(${across}% + 12px)` : "auto";
        tip.style.right = across < 50 ? "auto" : `calc(${100 - across}% + 12px)`;
        const y = data.series[0].y[at];
        dot.hidden = data.stacked || y === null || (log && y <= 0);
        const up = log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
        dot.style.left = `${across}%`;
        dot.style.top = `${100 - 100 * up}%`;
      };
      plot.addEventListener("pointermove", show);
      plot.addEventListener("pointerdown", show);
    }
  }
})();
