// Questions to the server. The page's own address has the token, so relative paths do.

async function read(answer) {
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error?.message ?? found.error ?? `status ${answer.status}`);
  return found;
}

const key = () => sessionStorage.getItem("leftfold-key");
const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

export async function get(name, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value != null)).toString();
  return read(await fetch(`api/${name}${text ? `?${text}` : ""}`, { headers: headers() }));
}

export async function post(name, body) {
  const sent = { "content-type": "application/json", ...headers() };
  return read(await fetch(`api/${name}`, { method: "POST", headers: sent, body: JSON.stringify(body) }));
}

// The newest question of a kind wins: answers to older ones are dropped, and at most one is under way.
export function newest(ask, take, fail) {
  let wanted = null;
  let busy = false;
  return async function again(...args) {
    wanted = args;
    if (busy) return;
    busy = true;
    while (wanted) {
      const asked = wanted;
      wanted = null;
      try {
        const found = await ask(...asked);
        if (!wanted) take(found, ...asked);
      } catch (error) {
        if (!wanted) fail(error);
      }
    }
    busy = false;
  };
}
