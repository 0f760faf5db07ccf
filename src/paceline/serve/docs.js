// Shows what /openapi.json says, page by page, with a command for each and a form to try it. All of it is written as text.
(() => {
  const LIMIT_MS = 30000, MOST = 2000, JSON_KIND = "application/json";
  const at = (id) => document.getElementById(id);
  const element = (name, kind, ...inside) => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    made.append(...inside);
    return made;
  };
  const keep = (() => { // a browser may forbid it; the page at / has its token there too
    try { return window.sessionStorage; } catch { return { getItem: () => "", setItem: () => {}, removeItem: () => {} }; }
  })();
  let token = keep.getItem("token") || "";
  const ask = (path, options = {}) => fetch(path, {
    ...options,
    cache: "no-store",
    headers: { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers },
    signal: AbortSignal.timeout(LIMIT_MS),
  });

  // ---- schemas

  let parts = {}; // that schemas name
  const whole = (schema) => (schema && schema.$ref ? parts[schema.$ref.split("/").pop()] || {} : schema || {});
  const words = (given) => {
    const schema = whole(given);
    if (schema.type === "array") {
      return schema.minItems && schema.minItems === schema.maxItems
        ? `${schema.minItems} × ${words(schema.items)}` : `list of ${words(schema.items)}`;
    }
    if (schema.properties) return `{${Object.entries(schema.properties).map(([name, one]) => `${name}: ${words(one)}`).join(", ")}}`;
    return schema.format === "binary" ? "bytes" : [schema.type || "anything"].flat().join(" or ");
  };
  const numbers = (given) => { // how many values an example has
    const schema = whole(given);
    if (schema.type === "array") return (schema.minItems || 1) * numbers(schema.items);
    return Object.values(schema.properties || { one: null }).reduce((sum, one) => sum + (one ? numbers(one) : 1), 0);
  };
  const example = (given) => {
    const schema = whole(given);
    if (schema.type === "array") return Array.from({ length: schema.minItems || 1 }, () => example(schema.items));
    if (schema.properties) return Object.fromEntries(Object.entries(schema.properties).map(([name, one]) => [name, example(one)]));
    const kind = [schema.type].flat()[0];
    return { boolean: false, string: "", object: {} }[kind] ?? schema.minimum ?? 0;
  };

  // ---- one page of the server

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const command = (method, path, kind, body) => {
    const told = ["curl"];
    if (method !== "GET" && !kind) told.push("-X", method);
    if (token) told.push("-H", quoted("Authorization: Bearer TOKEN"));
    if (kind) told.push("-H", quoted(`Content-Type: ${kind}`), "--data-binary", body === null ? "@FILE" : quoted(body));
    return [...told, new URL(path.slice(1), location.href).href].join(" ");
  };
  const table = (heads, rows) => {
    const made = element("table"), body = element("tbody");
    made.append(element("thead", "", element("tr", "", ...heads.map((head) => element("th", "text", head)))), body);
    for (const row of rows) body.append(element("tr", "", ...row.map((cell) => element("td", "text", cell))));
    return made;
  };
  const form = (method, path, parameters, body) => {
    const made = element("form", "try"), button = element("button", "", "Try it"), said = element("pre", "said");
    const text = body === undefined ? null : element("textarea");
    const inputs = parameters.filter((one) => one.in === "header").map((one) => {
      const input = element("input");
      input.name = one.name;
      made.append(element("label", "", `${one.name} `, input));
      return input;
    });
    if (text) {
      text.rows = 4;
      text.spellcheck = false;
      text.setAttribute("aria-label", "body");
      text.value = body;
      made.append(text);
    }
    said.hidden = true;
    made.append(button, said);
    made.addEventListener("submit", async (event) => {
      event.preventDefault();
      button.disabled = true;
      const began = performance.now(), headers = text ? { "Content-Type": JSON_KIND } : {};
      for (const input of inputs) if (input.value) headers[input.name] = input.value;
      try {
        const answer = await ask(path.slice(1), { method, headers, body: text ? text.value : undefined });
        const came = await answer.text(), version = answer.headers.get("X-Paceline-Version");
        const head = `${answer.status}${version ? `, version ${version}` : ""}, after ${Math.round(performance.now() - began)} ms`;
        said.textContent = `${head}\n${came.length > 10000 ? `${came.slice(0, 10000)} …` : came}`;
      } catch (error) {
        said.textContent = `no answer: ${error.message}`;
      }
      said.hidden = button.disabled = false;
    });
    return made;
  };
  const page = (method, path, told) => {
    const made = element("details");
    made.id = `${method} ${path}`;
    made.open = path === "/predict";
    made.append(element("summary", "", element("b", "", method), path, element("span", "what", told.summary || "")));
    const parameters = told.parameters || [], kinds = Object.entries((told.requestBody || {}).content || {});
    if (parameters.length) {
      made.append(element("h3", "", "Parameters"), table(["name", "where", "type", ""], parameters.map(
        (one) => [one.name, one.in + (one.required ? ", required" : ""), words(one.schema), one.description || ""])));
    }
    let body;
    const commands = kinds.length ? [] : [command(method, path)];
    if (kinds.length) {
      made.append(element("h3", "", "Body"), table(["kind", "what it holds"], kinds.map(([kind, one]) => [kind, words(one.schema)])));
    }
    for (const [kind, one] of kinds) {
      if (kind !== JSON_KIND) { commands.push(command(method, path, kind, null)); continue; }
      body = numbers(one.schema) <= MOST ? JSON.stringify(example(one.schema)) : ""; // else nobody would type it
      commands.push(command(method, path, kind, body || null));
    }
    made.append(element("h3", "", "Answers"), table(["status", "", "kinds"], Object.entries(told.responses || {}).map(
      ([status, one]) => [status, one.description, Object.entries(one.content || {}).map(
        ([kind, inner]) => `${kind}: ${words(inner.schema)}`).join("; ")])));
    made.append(element("h3", "", "From a shell"), element("pre", "command", commands.join("\n")));
    made.append(form(method, path, parameters, body));
    return made;
  };

  // ---- all of them

  const show = (told) => {
    parts = (told.components || {}).schemas || {};
    at("about").textContent = told.info.description || "";
    at("pages").replaceChildren(...Object.entries(told.paths).flatMap(
      ([path, methods]) => Object.entries(methods).map(([method, one]) => page(method.toUpperCase(), path, one))));
    at("links").hidden = Boolean(token); // links cannot bring it
  };
  const look = async () => {
    at("silent").hidden = true;
    try {
      const answer = await ask("openapi.json");
      at("ask").hidden = answer.status !== 401;
      if (answer.status === 401) {
        at("wrong").textContent = token ? "That is not its token." : "";
        token = "";
        keep.removeItem("token");
        at("token").focus();
      } else if (!answer.ok) {
        throw new Error(`status ${answer.status}`);
      } else {
        show(await answer.json());
        if (token) keep.setItem("token", token);
      }
    } catch (error) {
      at("silent").textContent = `The description cannot be had (${error.message}): load this page again.`;
      at("silent").hidden = false;
    }
  };
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = at("token").value.trim();
    at("token").value = "";
    look();
  });
  look();
})();
