// The view for those who run the server: what /metrics, /health and, of a router, /instances say, every two seconds.

import { getJson, getText } from "./api.js";
import { drawing, element, percent, plural, short } from "./dom.js";
import { Samples, quantile } from "./prometheus.js";
import { classOf, labelOf, tellsOf } from "./sources.js";

const PERIOD_MS = 2000;
const NUM_KEPT = 90;
const WINDOW = 15; // answers over which rates are taken
const GENERATED = "fastdeploy:generation_tokens_total";
const STEPS = "fastdeploy_sd:generation_steps_total";
const DRAFTED = "fastdeploy_sd:spec_decode_draft_tokens_by_source_total";
const ACCEPTED = "fastdeploy_sd:spec_decode_accepted_tokens_by_source_total";

/** The view; it asks the server only while it is shown. */
export class ServerView {
  constructor(box, about) {
    this.box = box;
    this.about = about;
    this.history = [];
    this.timer = null;
  }

  show(isShown) {
    clearTimeout(this.timer);
    this.isShown = isShown;
    if (isShown) this.poll();
  }

  async poll() {
    let problem = "";
    try {
      const [text, instances] = await Promise.all([getText("metrics"), this.about.isRouter ? getJson("instances") : null]);
      this.history.push({ time: performance.now() / 1000, samples: new Samples(text) });
      this.history.splice(0, this.history.length - NUM_KEPT);
      this.instances = instances?.instances ?? null;
    } catch (error) {
      problem = error.message;
    }
    if (!this.isShown) return;
    if (this.history.length) this.draw(problem);
    else this.box.replaceChildren(element("p", { class: "notice" }, problem));
    this.timer = setTimeout(() => this.poll(), PERIOD_MS);
  }

  draw(problem) {
    const now = this.history.at(-1).samples;
    const parts = [
      problem ? element("p", { class: "notice" }, `The server does not answer: ${problem}`) : null,
      now.of(GENERATED).length ? element("div", { class: "tiles" }, ...this.tiles(now)) : null,
      now.of(GENERATED).length ? this.sources(now) : null,
      this.instances ? element("div", { class: "tiles" }, ...this.routerTiles(now)) : null,
      this.instances ? instanceTable(this.instances) : null,
      element("p", { class: "hint" }, `Rates are of the last ${(PERIOD_MS * WINDOW) / 1000} seconds. Everything here is in `, element("a", { href: "metrics" }, "/metrics"), "."),
    ];
    this.box.replaceChildren(...parts.filter(Boolean));
  }

  /** Return how much a counter has grown per second, over the answers up to number `end`. */
  rate(name, end = this.history.length - 1) {
    const begin = Math.max(0, end - WINDOW);
    const seconds = this.history[end].time - this.history[begin].time;
    const growth = this.history[end].samples.sum(name) - this.history[begin].samples.sum(name);
    return end > begin ? growth / seconds : 0;
  }

  tiles(now) {
    const series = (value) => this.history.map((_, i) => value(i));
    const gauge = (name) => series((i) => this.history[i].samples.sum(name));
    const blocks = now.by("fastdeploy_sd:kv_cache_blocks", "state");
    const numBlocks = Object.values(blocks).reduce((sum, count) => sum + count, 0);
    const running = now.sum("fastdeploy:num_requests_running");
    const waiting = now.sum("fastdeploy:num_requests_waiting");
    const queried = now.sum("fastdeploy_sd:prefix_cache_query_tokens_total");
    const perStep = this.rate(GENERATED) / this.rate(STEPS);
    const gain = now.of("fastdeploy_sd:spec_decode_gain").map(({ value }) => value).filter((value) => value > 0);
    const first = this.history.at(Math.max(-1 - WINDOW, -this.history.length)).samples;
    const ttft = quantile(first, now, "fastdeploy:time_to_first_token_seconds", 0.5);
    const tpot = quantile(first, now, "fastdeploy:time_per_output_token_seconds", 0.5);
    return [
      tile("Generated", `${short(this.rate(GENERATED))}`, "tokens/s", `${short(now.sum(GENERATED), 4)} since the start`, line(series((i) => this.rate(GENERATED, i)))),
      tile("Tokens per step", short(Number.isFinite(perStep) ? perStep : now.sum(GENERATED) / now.sum(STEPS)), "", "of each request; plain decoding: 1", line(series((i) => this.rate(GENERATED, i) / this.rate(STEPS, i)))),
      tile("Gain", gain.length ? short(gain.reduce((a, b) => a + b) / gain.length) : "-", gain.length ? "times" : "", gain.length ? "as fast as plain decoding, in the latest steps" : "not measured yet", null),
      tile("Requests running", short(running), `of ${short(now.sum("fastdeploy:max_batch_size"))}`, `${short(this.rate("fastdeploy:requests_number_total") * 60)} a minute`, line(gauge("fastdeploy:num_requests_running"))),
      tile("Queue", short(waiting), waiting === 1 ? "request" : "requests", `${short(now.sum("fastdeploy_sd:num_waiting_tokens"))} prompt tokens`, line(gauge("fastdeploy:num_requests_waiting"))),
      tile("KV cache", percent((blocks.used ?? 0) / numBlocks), "in use", `${short(blocks.cached ?? 0, 4)} cached, ${short(blocks.free ?? 0, 4)} free of ${plural(numBlocks, "block")}`, meter([["used", blocks.used], ["cached", blocks.cached], ["free", blocks.free]])),
      tile("Prefix hits", percent(now.sum("fastdeploy:prefix_cache_token_num_total") / queried), "of prompt tokens", `${short(queried, 4)} looked up`, null),
      tile("First token", Number.isFinite(ttft) ? short(ttft * 1000) : "-", Number.isFinite(ttft) ? "ms, median" : "", Number.isFinite(tpot) ? `then ${short(tpot * 1000)} ms per token` : "no request has ended lately", null),
    ];
  }

  routerTiles(now) {
    const sum = (name) => this.instances.reduce((total, one) => total + one[name], 0);
    const numTaking = this.instances.filter((one) => one.state === "available").length;
    const numBlocks = sum("num_blocks");
    const relayed = now.of("fastdeploy_sd:http_requests_total").filter(({ labels }) => labels.route.startsWith("/v1/"));
    return [
      tile("Instances", short(numTaking), `of ${short(this.instances.length)}`, "take requests", null),
      tile("Requests running", short(sum("num_requests_running")), `of ${short(sum("max_num_seqs"))}`, `${short(relayed.reduce((total, { value }) => total + value, 0), 4)} answered since the start`, null),
      tile("Queue", short(sum("num_requests_waiting")), "requests", "at the instances", null),
      tile("KV caches", percent(numBlocks ? 1 - sum("num_available_blocks") / numBlocks : NaN), "in use", `of ${plural(numBlocks, "block")}`, null),
      tile("Streams resumed", short(now.sum("fastdeploy_sd:router_resumed_streams_total")), "", "at another instance", null),
      tile("Retries", short(now.sum("fastdeploy_sd:router_retries_total")), "", `${short(now.sum("fastdeploy_sd:router_unplaced_total"))} requests found no instance`, null),
    ];
  }

  /** Return the tokens per step by source: since the start, as few requests would leave a short time empty. */
  sources(now) {
    const steps = now.sum(STEPS);
    const accepted = now.by(ACCEPTED, "source");
    const drafted = now.by(DRAFTED, "source");
    const numAccepted = Object.values(accepted).reduce((sum, count) => sum + count, 0);
    const counts = { target: now.sum(GENERATED) - numAccepted, ...accepted };
    const names = [...new Set(["target", ...Object.keys(drafted)])].sort((a, b) => (counts[b] ?? 0) - (counts[a] ?? 0));
    const parts = names.map((name) => {
      const part = element("span", { class: `fill ${classOf(name)}` });
      part.style.flexGrow = counts[name] ?? 0;
      return part;
    });
    const rows = names.map((name) => element("tr", {},
      element("th", { scope: "row", title: tellsOf(name) }, element("span", { class: `swatch ${classOf(name)}`, "aria-hidden": "true" }), labelOf(name)),
      ...[short((counts[name] ?? 0) / steps), short(counts[name] ?? 0, 4), drafted[name] === undefined ? "" : short(drafted[name], 4), drafted[name] ? percent((accepted[name] ?? 0) / drafted[name]) : ""]
        .map((text) => element("td", {}, text))));
    const head = ["Source", "Per step", "Tokens", "Drafted", "Accepted"].map((text) => element("th", { scope: "col" }, text));
    return element("section", { class: "panel", "aria-label": "Tokens by source" },
      element("h2", {}, `${short(now.sum(GENERATED) / steps)} tokens per step since the start`),
      element("div", { class: "share tall", "aria-hidden": "true" }, ...parts),
      element("div", { class: "table" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
  }
}

function tile(name, value, unit, more, picture) {
  const number = element("div", { class: "number" }, value, unit ? element("small", {}, ` ${unit}`) : null);
  return element("section", { class: "tile", "aria-label": name }, element("h3", {}, name), number, element("p", {}, more), picture);
}

/** Return a line through some values, from 0 at the bottom to the largest at the top. */
function line(values) {
  const known = values.map((value) => (Number.isFinite(value) ? value : 0));
  const most = Math.max(...known, 1e-9);
  const points = known.map((value, i) => `${(i / Math.max(known.length - 1, 1)) * 100},${29 - (value / most) * 28}`);
  return drawing("svg", { class: "line", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, drawing("polyline", { points: points.join(" ") }));
}

function meter(parts) {
  return element("div", { class: "share", "aria-hidden": "true" }, ...parts.map(([name, count]) => {
    const part = element("span", { class: `fill kv-${name}` });
    part.style.flexGrow = count ?? 0;
    return part;
  }));
}

function instanceTable(instances) {
  const head = ["Instance", "Role", "State", "Running", "Waiting", "KV in use"].map((text) => element("th", { scope: "col" }, text));
  const rows = instances.map((one) => element("tr", {},
    element("th", { scope: "row", title: `${one.id}: ${one.models.join(", ")}` }, `${one.id.slice(0, 8)}${one.engine ? `, engine ${one.engine}` : ""}`, element("small", {}, ` ${one.address}`)),
    element("td", {}, one.role),
    element("td", { class: `state-${one.state}` }, one.state),
    ...[`${one.num_requests_running} of ${one.max_num_seqs}`, String(one.num_requests_waiting), percent(1 - one.num_available_blocks / one.num_blocks)].map((text) => element("td", {}, text))));
  return element("section", { class: "panel", "aria-label": "Instances" },
    element("h2", {}, plural(instances.length, "instance")),
    element("div", { class: "table" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
}
