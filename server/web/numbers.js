// The engine in six numbers. In: what /live told, again and again. Out: text, rates from the difference to before.

const RATE_SECONDS = 3;
const TTFT_SECONDS = 60;

export class Numbers {
  /** What /live told within the last minute, oldest first. */
  #past = [];

  show(live) {
    if (this.#past.length && live.seconds < this.#past.at(-1).seconds) this.#past = []; // the server has restarted
    this.#past.push(live);
    while (live.seconds - this.#past[0].seconds > TTFT_SECONDS) this.#past.shift();
    put("running", live.num_running);
    put("waiting", live.num_waiting);
    put("rate", rate(this.#before(live, RATE_SECONDS), live));
    put("ttft", timeToFirstToken(this.#past[0], live));
    put("hits", percent(live.prefix_cache_hits, live.prefix_cache_queries));
    put("usage", `${(live.kv_cache_usage * 100).toFixed(live.kv_cache_usage < 0.1 ? 1 : 0)} %`);
  }

  /** The oldest that is at most so many seconds old. */
  #before(live, seconds) {
    return this.#past.find((then) => live.seconds - then.seconds <= seconds);
  }
}

function put(id, value) {
  document.getElementById(id).textContent = value;
}

function rate(then, live) {
  const seconds = live.seconds - then.seconds;
  const tokens = live.generation_tokens - then.generation_tokens;
  return seconds > 0 ? (tokens / seconds).toFixed(tokens < 100 * seconds ? 1 : 0) : "–";
}

/** The mean over the last minute or, where nobody came, since the server began. */
function timeToFirstToken(then, live) {
  const isRecent = live.first_tokens > then.first_tokens;
  const count = live.first_tokens - (isRecent ? then.first_tokens : 0);
  if (!count) return "–";
  const seconds = (live.first_token_seconds - (isRecent ? then.first_token_seconds : 0)) / count;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`;
}

function percent(part, whole) {
  return whole ? `${Math.round((part / whole) * 100)} %` : "–";
}
