// Communication with the monitor: the token, requests, and the event stream.

const HEADER = "x-monitor-token";
const FIRST_MS = 500, MOST_MS = 5000; // between two tries to connect
const SILENCE_MS = 25000; // the monitor sends something every 10 s

// The token follows the # of the link, which browsers do not send; it is stored for reloads of this tab.
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem("token");
}

export class Wire {
  constructor(token) {
    this.headers = { [HEADER]: token };
  }

  async read(path) {
    const answer = await fetch(path, { headers: this.headers });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  async file(path) {
    const answer = await fetch(path, { headers: this.headers });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.blob();
  }

  async post(path, body = "") {
    const answer = await fetch(path, { method: "POST", headers: this.headers, body });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  // Calls onState with each new state, onLink with "live", "lost" or "refused". (EventSource cannot send a header.)
  async follow(onState, onLink) {
    let wait = FIRST_MS;
    for (;;) {
      const ending = new AbortController();
      let watch = 0;
      const awake = () => {
        clearTimeout(watch);
        watch = setTimeout(() => ending.abort(), SILENCE_MS);
      };
      try {
        awake();
        const answer = await fetch("/api/stream", { headers: this.headers, signal: ending.signal });
        if (answer.status === 401 || answer.status === 403) {
          onLink("refused", await answer.text());
          return;
        }
        if (answer.ok) {
          onLink("live");
          wait = FIRST_MS;
          await events(answer.body, awake, onState);
        }
      } catch {
        // The monitor has ended or cannot be reached: try again.
      } finally {
        clearTimeout(watch);
      }
      onLink("lost");
      await new Promise((go) => setTimeout(go, wait));
      wait = Math.min(2 * wait, MOST_MS);
    }
  }
}

async function events(body, awake, onState) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    awake();
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) onState(JSON.parse(part.slice(6)));
    }
  }
}
