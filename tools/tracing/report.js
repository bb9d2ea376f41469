// SPDX-License-Identifier: Apache-2.0
// The pictures of a report: all share one time axis, which is dragged over to
// zoom.  D is the data that report.py wrote into the page.
"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
addEventListener("error", e => { document.documentElement.dataset.error = e.message; });
const pick = document.getElementById("rank"); // null: there is one
const view = { from: D.range[0], to: D.range[1], rank: Number(pick?.value ?? 0), only: -1 };
const panels = [];
const tip = document.getElementById("tip");

function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function luminance(color) {
    const n = parseInt(color.slice(1), 16);
    return (0.299 * (n >> 16) + 0.587 * (n >> 8 & 255) + 0.114 * (n & 255)) / 255;
}

// A colour that cannot be told from the paper is drawn as ink.
function shown(color) {
    return Math.abs(luminance(color) - luminance(css("--paper"))) < 0.12
        ? css("--ink") : color;
}

// ---- text ----

function time(us) {
    const a = Math.abs(us);
    if (a >= 1e6) return (us / 1e6).toFixed(3) + " s";
    if (a >= 1e3) return (us / 1e3).toFixed(a >= 1e5 ? 1 : 2) + " ms";
    return us.toFixed(1) + " µs";
}

function bytes(n) {
    const unit = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (n >= 1024 && i < 4) { n /= 1024; i++; }
    return n.toFixed(i && n < 100 ? 1 : 0) + " " + unit[i];
}

function perSecond(n, unit) {
    const prefix = ["", "k", "M", "G", "T", "P"];
    let i = 0;
    while (n >= 999.5 && i < 5) { n /= 1000; i++; }
    return n.toPrecision(3) + " " + prefix[i] + unit + "/s";
}

// ---- the frame of a picture ----

// [[time, text]], all in one unit and with the decimals that tell them apart.
function ticks(from, to, most) {
    const raw = (to - from) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw);
    const [unit, name] = to >= 1e6 ? [1e6, "s"] : to >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const decimals = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    const out = [];
    for (let n = Math.ceil(from / step); n * step <= to; n++)
        out.push([n * step, (n * step / unit).toFixed(decimals) + " " + name]);
    return out;
}

class Panel {
    // draw(p) and tell(x, y, p) get the panel; height(): pixels without axis, or 0
    // where there is nothing to draw.
    constructor(id, height, draw, tell) {
        this.canvas = document.getElementById(id);
        this.height = height;
        this.draw = draw;
        this.tell = tell;
        panels.push(this);
        this.listen();
    }

    x(t) {
        return this.left + (t - view.from) / (view.to - view.from) * this.width;
    }

    time(x) {
        return view.from + (x - this.left) / this.width * (view.to - view.from);
    }

    render() {
        const c = this.canvas, ratio = window.devicePixelRatio || 1;
        this.bottom = this.height();
        c.parentElement.hidden = !this.bottom;
        if (!this.bottom) return;
        const width = c.parentElement.clientWidth, height = this.bottom + 20;
        c.style.height = height + "px";
        c.width = Math.round(width * ratio);
        c.height = Math.round(height * ratio);
        this.left = width < 700 ? 100 : 150;
        this.width = Math.max(1, width - this.left - 8);
        const g = this.g = c.getContext("2d");
        g.setTransform(ratio, 0, 0, ratio, 0, 0);
        g.font = "12px system-ui, 'DejaVu Sans', sans-serif";
        g.clearRect(0, 0, width, height);
        this.grid();
        this.draw(this);
        this.marks();
    }

    grid() {
        const g = this.g, most = this.width < 500 ? 4 : 9;
        g.fillStyle = css("--panel");
        g.fillRect(this.left, 0, this.width, this.bottom);
        g.strokeStyle = css("--grid");
        g.fillStyle = css("--faint");
        g.textAlign = "center";
        g.textBaseline = "top";
        g.lineWidth = 1;
        for (const [t, text] of ticks(view.from, view.to, most)) {
            const x = this.upright(t);
            if (x < this.left + this.width - 24)
                g.fillText(text, Math.max(x, this.left + 18), this.bottom + 5);
        }
    }

    // Ends of steps.
    marks() {
        const g = this.g;
        g.strokeStyle = css("--mark");
        g.setLineDash([4, 3]);
        for (const end of D.ends)
            if (end >= view.from && end <= view.to) this.upright(end);
        g.setLineDash([]);
    }

    rule(fromX, fromY, toX, toY) {
        this.g.beginPath();
        this.g.moveTo(fromX, fromY);
        this.g.lineTo(toX, toY);
        this.g.stroke();
    }

    // A line at time t, and where it is.
    upright(t) {
        const x = Math.round(this.x(t)) + 0.5;
        this.rule(x, 0, x, this.bottom);
        return x;
    }

    label(text, y, faint) {
        const g = this.g;
        g.fillStyle = css(faint ? "--faint" : "--ink");
        g.textAlign = "right";
        g.textBaseline = "middle";
        let s = text;
        while (s.length > 3 && g.measureText(s).width > this.left - 8)
            s = s.slice(0, -2) + "…";
        g.fillText(s, this.left - 6, y);
    }

    listen() {
        const c = this.canvas;
        let down = null;
        const dragged = e => down !== null && Math.abs(e.offsetX - down) > 4;
        c.addEventListener("pointerdown", e => { down = e.offsetX; });
        c.addEventListener("pointermove", e => {
            if (dragged(e)) {
                this.render();
                this.g.fillStyle = css("--mark");
                this.g.globalAlpha = 0.2;
                this.g.fillRect(down, 0, e.offsetX - down, this.bottom);
                this.g.globalAlpha = 1;
            } else
                showTip(e.offsetX < this.left ? null : this.tell(e.offsetX, e.offsetY, this), e);
        });
        c.addEventListener("pointerup", e => {
            const [a, b] = [down, e.offsetX].map(x => this.time(x)).sort((p, q) => p - q);
            const far = dragged(e);
            down = null;
            if (far) zoom(a, b);
        });
        c.addEventListener("pointerleave", () => { down = null; showTip(null); });
        c.addEventListener("dblclick", () => zoom(...D.range));
        c.addEventListener("wheel", e => {
            if (!e.ctrlKey) return; // that scrolls the page
            e.preventDefault();
            const t = this.time(e.offsetX), by = e.deltaY < 0 ? 0.8 : 1.25;
            zoom(t - (t - view.from) * by, t + (view.to - t) * by);
        }, { passive: false });
    }
}

function showTip(text, e) {
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(e.clientX + 14, innerWidth - w - 6)) + "px";
    tip.style.top = (e.clientY + h + 24 > innerHeight ? e.clientY - h - 10 : e.clientY + 16) + "px";
}

function zoom(from, to) {
    const least = 1;
    from = Math.max(D.range[0], from);
    to = Math.min(D.range[1], to);
    if (to - from < least) return;
    view.from = from;
    view.to = to;
    renderAll();
}

function renderAll() {
    for (const e of document.querySelectorAll(".of"))
        e.textContent = D.ranks.length > 1 ? ` of rank ${one().rank}` : "";
    for (const p of panels) p.render();
}

// ---- tasks ----

// row: the tasks of one row, sorted by begin, as indexes into the rank's arrays.
function drawRow(p, rank, row, y, h) {
    const g = p.g;
    let lastX = -9, lastKind = -1;
    for (const i of row) {
        if (rank.b[i] + rank.d[i] < view.from || rank.b[i] > view.to) continue;
        const x = Math.max(p.x(rank.b[i]), p.left);
        const end = Math.min(p.x(rank.b[i] + rank.d[i]), p.left + p.width);
        const w = Math.max(end - x, 0.7);
        if (w < 1 && x - lastX < 0.7 && rank.k[i] === lastKind) continue;
        lastX = x;
        lastKind = rank.k[i];
        g.globalAlpha = view.only < 0 || view.only === rank.k[i] ? 1 : 0.12;
        g.fillStyle = shown(D.kinds[rank.k[i]].color);
        g.fillRect(x, y, w, h);
        if (w > 6) {
            g.strokeStyle = css("--paper");
            g.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
        }
        name(p, rank, i, x, y, w, h);
        g.globalAlpha = 1;
    }
}

function name(p, rank, i, x, y, w, h) {
    const text = D.units[rank.u[i]] || "";
    if (!text || w < 26 || h < 13) return;
    const g = p.g;
    if (g.measureText(text).width > w - 4) return;
    g.fillStyle = luminance(shown(D.kinds[rank.k[i]].color)) > 0.45 ? "#000" : "#fff";
    g.textAlign = "center";
    g.textBaseline = "middle";
    g.fillText(text, x + w / 2, y + h / 2 + 0.5);
}

function describe(rank, i) {
    const k = D.kinds[rank.k[i]].name, unit = D.units[rank.u[i]];
    const seconds = Math.max(rank.d[i], 0.1) / 1e6; // they are rounded to 0.1 µs
    const lines = [`${k}${unit ? " " + unit : ""}, step ${rank.s[i] + 1}`,
        `rank ${rank.rank}, ${rank.workers[rank.w[i]]}`,
        `${time(rank.d[i])} from ${time(rank.b[i])}`];
    if (rank.n[i]) lines.push(`${bytes(rank.n[i])}, ${perSecond(rank.n[i] / seconds, "B")}`);
    if (rank.f[i]) lines.push(perSecond(rank.f[i] / seconds, "FLOP"));
    return lines.join("\n");
}

// The task of a row at time t, or one that is at most 3 pixels away.
function taskAt(p, rank, row, x) {
    const t = p.time(x);
    let best = -1, distance = p.time(x + 3) - t;
    for (const i of row) {
        const d = Math.max(rank.b[i] - t, t - rank.b[i] - rank.d[i], 0);
        if (d < distance) { best = i; distance = d; }
    }
    return best;
}

function rowsBy(rank, key) {
    const rows = {};
    const order = [...rank.b.keys()].sort((a, b) => rank.b[a] - rank.b[b]);
    for (const i of order) (rows[key(i)] ||= []).push(i);
    return rows;
}

for (const r of D.ranks) {
    r.byWorker = rowsBy(r, i => r.w[i]);
    r.byUnit = rowsBy(r, i => r.u[i] * 4 + D.kinds[r.k[i]].band);
}

function chosen() {
    return view.rank < 0 ? D.ranks : [D.ranks[view.rank]];
}

function one() {
    return D.ranks[Math.max(view.rank, 0)];
}

// ---- Gantt ----

function ganttRows() {
    return chosen().flatMap(r => r.workers.map((name, w) => ({ r, w, name })));
}

// The least is that of a line of text.
function rowHeight() {
    return ganttRows().length > 40 ? 13 : 22;
}

new Panel("gantt", () => ganttRows().length * rowHeight(), p => {
    const h = rowHeight();
    ganttRows().forEach(({ r, w, name }, n) => {
        const many = chosen().length > 1 ? `r${r.rank} ` : "";
        p.label(many + name, n * h + h / 2);
        drawRow(p, r, r.byWorker[w] || [], n * h + 2, h - 4);
        if (n && !w) {
            p.g.strokeStyle = css("--line");
            p.g.strokeRect(0, n * h, p.left + p.width, 0);
        }
    });
}, (x, y, p) => {
    const row = ganttRows()[Math.floor(y / rowHeight())];
    if (!row) return null;
    const i = taskAt(p, row.r, row.r.byWorker[row.w] || [], x);
    return i < 0 ? null : describe(row.r, i);
});

// ---- unit x time ----

function unitHeight() {
    return Math.max(4, Math.min(28, Math.floor(420 / D.units.length)));
}

// Upper ends of the four bands of a unit, as parts of its height.
const BANDS = [0, 0.22, 0.6, 0.8, 1];

new Panel("units", () => unitHeight() * D.units.length, p => {
    const h = unitHeight(), r = one();
    D.units.forEach((unit, u) => {
        if (h >= 11 || u % Math.ceil(12 / h) === 0) p.label(unit, u * h + h / 2);
        for (let k = 0; k < 4; k++)
            drawRow(p, r, r.byUnit[u * 4 + k] || [], u * h + BANDS[k] * (h - 1),
                Math.max((BANDS[k + 1] - BANDS[k]) * (h - 1), 1));
        p.g.strokeStyle = css("--line");
        p.g.globalAlpha = 0.5;
        p.g.strokeRect(p.left, u * h - 0.5, p.width, 0);
        p.g.globalAlpha = 1;
    });
}, (x, y, p) => {
    const h = unitHeight(), u = Math.floor(y / h), r = one();
    const k = BANDS.findLastIndex(l => l * (h - 1) <= y - u * h && l < 1);
    const i = taskAt(p, r, r.byUnit[u * 4 + k] || [], x);
    return i < 0 ? D.units[u] || null : describe(r, i);
});

// ---- curves ----

// Largest value of a step function [times, values] from a to b.
function maxIn([times, values], a, b = a) {
    let n = 0, end = times.length;
    while (n < end) { // n becomes the number of times up to a
        const middle = (n + end) >> 1;
        if (times[middle] <= a) n = middle + 1; else end = middle;
    }
    let most = n ? values[n - 1] : 0;
    for (; n < times.length && times[n] < b; n++) most = Math.max(most, values[n]);
    return most;
}

function scale(p, top, text) {
    p.label(text, 8, true);
    return v => p.bottom - v / top * (p.bottom - 6);
}

function columns(p) {
    const out = [];
    for (let x = 0; x < p.width; x++)
        out.push([p.left + x, p.time(p.left + x), p.time(p.left + x + 1)]);
    return out;
}

function line(p, series, y, color) {
    const g = p.g;
    g.strokeStyle = color;
    g.lineWidth = 1.5;
    g.beginPath();
    for (const [x, a, b] of columns(p)) g.lineTo(x, y(maxIn(series, a, b)));
    g.stroke();
    g.lineWidth = 1;
}

function dashed(p, y, color) {
    p.g.strokeStyle = color;
    p.g.setLineDash([7, 4]);
    p.rule(p.left, y, p.left + p.width, y);
    p.g.setLineDash([]);
}

// In use by class, one over the other, under the plan.
function memoryPanel(tier) {
    const of = () => one().memory[tier];
    new Panel("memory-" + tier, () => of() ? 110 : 0, p => {
        const m = of(), y = scale(p, m.plan * 1.06, "plan " + bytes(m.plan));
        p.label(tier, p.bottom / 2);
        const under = new Array(Math.ceil(p.width)).fill(0);
        m.classes.forEach((c, n) => {
            p.g.fillStyle = shown(D.classes[c.name]);
            columns(p).forEach(([x, a, b], i) => {
                const v = maxIn(c.points, a, b);
                p.g.fillRect(x, y(under[i] + v), 1, y(under[i]) - y(under[i] + v));
                under[i] += v;
            });
        });
        dashed(p, y(m.plan), css("--mark"));
    }, (x, y, p) => {
        const m = of(), t = p.time(x);
        const rows = m.classes.map(c => [c.name, maxIn(c.points, t), c.plan]);
        const sum = rows.reduce((s, r) => s + r[1], 0);
        return [`${tier} at ${time(t)}: ${bytes(sum)} of ${bytes(m.plan)}`,
            ...rows.reverse().map(r => `${r[0]}: ${bytes(r[1])} of ${bytes(r[2])}`)].join("\n");
    });
}
D.tiers.forEach(memoryPanel);

function linkRows() {
    return Object.entries(one().links);
}

new Panel("links", () => linkRows().length ? 120 : 0, p => {
    const rows = linkRows();
    const top = Math.max(1, ...rows.flatMap(([, l]) => [...l.v, l.limit || 0])) * 1.06;
    const y = scale(p, top, perSecond(top, "B"));
    rows.forEach(([link, l]) => {
        line(p, [D.bins, l.v], y, shown(D.linkColors[link]));
        if (l.limit) dashed(p, y(l.limit), shown(D.linkColors[link]));
    });
}, (x, y, p) => linkRows().map(([link, l]) =>
    `${link}: ${perSecond(maxIn([D.bins, l.v], p.time(x)), "B")}` +
    (l.limit ? ` of ${perSecond(l.limit, "B")}` : "")).join("\n"));

new Panel("ready", () => one().ready[0].length ? 80 : 0, p => {
    const top = Math.max(1, ...one().ready[1]) * 1.06;
    line(p, one().ready, scale(p, top, Math.floor(top) + " tasks"), shown("#0072b2"));
}, (x, y, p) => `${maxIn(one().ready, p.time(x))} tasks ready`);

// ---- controls ----

const root = document.documentElement, legend = document.getElementById("legend").children;
for (const b of legend)
    b.onclick = () => {
        const kind = Number(b.dataset.kind);
        view.only = view.only === kind ? -1 : kind;
        for (const o of legend) o.className = view.only < 0 || o === b ? "" : "off";
        renderAll();
    };

function setTheme(dark) {
    root.dataset.theme = dark ? "dark" : "light";
    for (const i of document.querySelectorAll("i[data-color]"))
        i.style.background = shown(i.dataset.color);
    renderAll();
}

// Takes a part of the width away on both sides.
function narrow(part) {
    const w = (view.to - view.from) * part;
    zoom(view.from + w, view.to - w);
}

function move(part) {
    const w = view.to - view.from;
    const from = Math.max(D.range[0], Math.min(D.range[1] - w, view.from + w * part));
    zoom(from, from + w);
}

// The step after the one that the view begins in; the first one of all.
function nextStep() {
    const ends = D.ends.filter(e => e > D.range[0] && e < D.range[1]);
    const all = [D.range[0], ...ends, D.range[1]];
    const whole = view.from === D.range[0] && view.to === D.range[1];
    const now = all.findIndex(e => e > view.from + (view.to - view.from) * 0.02);
    const n = whole || now < 1 || now + 1 >= all.length ? 1 : now + 1;
    zoom(all[n - 1], all[n]);
}

const BUTTONS = { all: () => zoom(...D.range), step: nextStep, in: () => narrow(1 / 4),
    out: () => narrow(-1 / 2), left: () => move(-1 / 2), right: () => move(1 / 2),
    theme: () => setTheme(root.dataset.theme === "light") };
for (const id in BUTTONS) document.getElementById(id).onclick = BUTTONS[id];
const KEYS = { "+": "in", "-": "out", w: "in", s: "out", a: "left", d: "right",
    ArrowLeft: "left", ArrowRight: "right", n: "step", 0: "all" };
addEventListener("keydown", e => {
    if (!(e.key in KEYS) || e.ctrlKey || e.altKey || e.metaKey || e.target.tagName === "SELECT") return;
    e.preventDefault();
    BUTTONS[KEYS[e.key]]();
});
if (pick) pick.onchange = () => { view.rank = Number(pick.value); renderAll(); };
addEventListener("resize", renderAll);
const night = matchMedia("(prefers-color-scheme: dark)");
night.addEventListener("change", () => setTheme(night.matches));
setTheme(location.hash ? location.hash === "#dark" : night.matches);
root.dataset.drawn = panels.length;
