// The state of the page in the fragment of its address, which a browser does not send to any server.

const MAX_LENGTH = 8000;

export function read() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

/** Replace the fragment; a state too long for an address keeps its tab only. */
export function write(state) {
  const entries = Object.entries(state).filter(([, value]) => value !== "" && value !== undefined);
  let fragment = new URLSearchParams(entries).toString();
  const fits = fragment.length <= MAX_LENGTH;
  if (!fits) fragment = new URLSearchParams({ tab: state.tab }).toString();
  history.replaceState(null, "", `#${fragment}`);
  return fits;
}
