// The browser of episodes. The index and the blocks of HTML are compressed, and unpacked when they are needed; all HTML
// was made, and its texts escaped, when the report was written.
"use strict";

(async () => {
  const list = document.getElementById("episode-list");
  if (!list) return;
  const field = (id) => document.getElementById(id);
  const form = field("filters");

  async function unpack(id) {
    const text = atob(field(id).textContent);
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  const index = JSON.parse(await unpack("episode-index"));
  const count = index.epochs.length;
  const placeOf = []; // block and position in it, of each episode
  index.blocks.forEach((size, block) => {
    for (let position = 0; position < size; position++) placeOf.push([block, position]);
  });

  const cache = new Map(); // the blocks used last
  async function block(number) {
    if (!cache.has(number)) cache.set(number, unpack(`block-${number}`).then((html) => html.split("\x1e")));
    const found = cache.get(number);
    cache.delete(number);
    cache.set(number, found);
    if (cache.size > 40) cache.delete(cache.keys().next().value);
    return found;
  }

  // Words of a search as they stand in HTML without its tags.
  const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;" };
  const escaped = (text) => text.replace(/[&<>"']/g, (sign) => escapes[sign]);
  const plain = (html) => html.replace(/<[^>]*>/g, "").toLowerCase();

  const orders = {
    newest: (a, b) => (index.epochs[b] ?? -1) - (index.epochs[a] ?? -1) || a - b,
    oldest: (a, b) => (index.epochs[a] ?? -1) - (index.epochs[b] ?? -1) || a - b,
    best: (a, b) => (index.rewards[b] ?? -Infinity) - (index.rewards[a] ?? -Infinity) || a - b || 0,
    worst: (a, b) => (index.rewards[a] ?? Infinity) - (index.rewards[b] ?? Infinity) || a - b || 0,
    longest: (a, b) => index.tokens[b] - index.tokens[a] || a - b,
  };
  const bits = { failed: 1, cut: 2, tools: 4, unscorable: 8 };

  function within(value, low, high) {
    if (low === "" && high === "") return true;
    return value !== null && (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
  }

  let page = 0;
  let found = [];
  let turn = 0; // a later change of the filters makes an earlier search give up

  async function filter() {
    const mine = ++turn;
    const value = (id) => field(id).value.trim();
    const [example, text, outcome] = [value("f-example").toLowerCase(), value("f-text").toLowerCase(), value("f-outcome")];
    const names = index.names.map((name) => name.toLowerCase());
    const exact = names.includes(example);
    let kept = [];
    for (let i = 0; i < count; i++) {
      const name = names[index.examples[i]];
      if (example && (exact ? name !== example : !name.includes(example))) continue;
      if (!within(index.epochs[i], value("f-epoch-low"), value("f-epoch-high"))) continue;
      if (!within(index.rewards[i], value("f-reward-low"), value("f-reward-high"))) continue;
      if (outcome !== "all" && !(index.flags[i] & bits[outcome])) continue;
      kept.push(i);
    }
    if (text) kept = await search(kept, escaped(text), mine);
    if (mine !== turn) return;
    found = kept.sort(orders[field("f-sort").value]);
    page = Math.min(page, Math.max(0, Math.ceil(found.length / index.page) - 1));
    await show(mine);
  }

  async function search(candidates, words, mine) {
    const kept = [];
    let at = -1;
    let texts = [];
    for (const [order, i] of candidates.entries()) {
      const [number, position] = placeOf[i];
      if (number !== at) {
        field("page-state").textContent = `searching … ${Math.round((100 * order) / candidates.length)} %`;
        texts = (await unpack(`block-${number}`)).split("\x1e");
        at = number;
        if (mine !== turn) return [];
      }
      if (plain(texts[position]).includes(words)) kept.push(i);
    }
    return kept;
  }

  async function show(mine) {
    const shown = found.slice(page * index.page, (page + 1) * index.page);
    list.classList.add("busy");
    const html = [];
    for (const i of shown) html.push((await block(placeOf[i][0]))[placeOf[i][1]]);
    if (mine !== undefined && mine !== turn) return;
    const open = new Set([...list.querySelectorAll(".episode[open]")].map((episode) => episode.id));
    list.innerHTML = html.join("") || '<p class="empty">No episode passes these filters.</p>';
    for (const episode of list.querySelectorAll(".episode")) episode.open = open.has(episode.id);
    ready();
  }

  function ready() {
    list.classList.remove("busy");
    // One stop of the tab key for each episode; arrow keys go on from token to token.
    for (const episode of list.querySelectorAll(".episode")) {
      episode.querySelectorAll(".t").forEach((token, order) => (token.tabIndex = order ? -1 : 0));
    }
    const pages = Math.max(1, Math.ceil(found.length / index.page));
    const all = found.length === count ? "" : ` of ${count.toLocaleString("en")}`;
    field("page-state").textContent = `Page ${page + 1} of ${pages} · ${found.length.toLocaleString("en")}${all} episodes`;
    field("page-back").disabled = page === 0;
    field("page-on").disabled = page >= pages - 1;
    readout.hidden = true;
    hideTooltip();
  }

  async function turnTo(number) {
    page = number;
    await show();
    document.getElementById("episodes").scrollIntoView();
  }

  field("page-back").addEventListener("click", () => turnTo(page - 1));
  field("page-on").addEventListener("click", () => turnTo(page + 1));
  form.addEventListener("submit", (event) => event.preventDefault());
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      page = 0;
      filter();
    }, 200);
  });
  form.addEventListener("reset", () =>
    setTimeout(() => {
      page = 0;
      filter();
    })
  );
  for (const name of index.names.slice(0, 2000)) {
    const option = document.createElement("option");
    option.value = name;
    field("f-examples").append(option);
  }

  // The numbers of a token: in a tooltip under the pointer, and below the list for the token that was chosen.
  const readout = document.createElement("div");
  readout.id = "readout";
  readout.hidden = true;
  readout.setAttribute("role", "status");
  list.after(readout);
  const kinds = [
    ["a", "advantage"],
    ["l", "log-probability"],
    ["e", "entropy"],
  ];

  function numbers(token) {
    const rows = kinds.filter(([key]) => token.dataset[key] !== undefined).map(([key, name]) => [name, token.dataset[key]]);
    const logprob = Number(token.dataset.l);
    if (token.dataset.l !== undefined) rows.push(["probability", Number(Math.exp(logprob).toPrecision(3)).toString()]);
    return rows;
  }

  list.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".t");
    if (token) showTooltip([JSON.stringify(token.textContent), ...numbers(token).map((row) => row.join(" "))].join("\n"), event.clientX, event.clientY);
  });

  list.addEventListener("focusin", (event) => {
    const token = event.target.closest(".t");
    readout.hidden = !token;
    if (!token) return;
    const text = document.createElement("code");
    text.textContent = JSON.stringify(token.textContent);
    const rows = numbers(token).map(([name, value]) => {
      const row = document.createElement("span");
      const strong = document.createElement("b");
      strong.textContent = value;
      row.append(`${name} `, strong);
      return row;
    });
    readout.replaceChildren(text, ...rows);
  });

  list.addEventListener("keydown", (event) => {
    const token = event.target.closest(".t");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!token || !step) return;
    const tokens = [...token.closest(".episode").querySelectorAll(".t")];
    const next = tokens[tokens.indexOf(token) + step];
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // What a page that loads itself again brings back: filters, page, and episodes that were open.
  keepState("episodes", {
    save: () => ({
      fields: [...form.elements].filter((each) => each.id).map((each) => [each.id, each.value]),
      shade: document.querySelector('input[name="shade"]:checked')?.id,
      open: [...list.querySelectorAll(".episode[open]")].map((episode) => episode.id),
      page,
    }),
    restore: async (state) => {
      for (const [id, value] of state.fields) if (field(id)) field(id).value = value;
      if (state.shade && field(state.shade)) field(state.shade).checked = true;
      page = state.page;
      await filter();
      for (const episode of list.querySelectorAll(".episode")) episode.open = state.open.includes(episode.id);
    },
    otherwise: async () => {
      const order = [...Array(count).keys()].sort(orders.newest);
      found = order;
      // The first page may have had no room for all of its episodes.
      if (list.querySelectorAll(".episode").length < Math.min(count, index.page)) {
        const open = list.querySelector(".episode[open]")?.id;
        await show();
        if (open && field(open)) field(open).open = true;
      } else ready();
    },
  });
})();
