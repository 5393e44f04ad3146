/* Lets the keyboard scroll wide tables: the theme wraps them in elements that cannot be focused. */
new MutationObserver(() => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table");
  }
}).observe(document, { childList: true, subtree: true });
