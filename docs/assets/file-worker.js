/*
 * Lets the search run on pages that are opened from the file system, where browsers refuse to start
 * workers: the worker's script runs in a hidden frame instead.
 */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "Search";
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.#receive(data);
      const script = scope.document.createElement("script");
      script.src = new URL(url, location.href).href;
      this.ready = new Promise((resolve) => script.addEventListener("load", () => resolve(scope)));
      scope.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }

    #receive(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }
  };
}
